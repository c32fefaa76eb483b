"""Prints docs/settings.md from the declarations: python docs/make_settings.py > docs/settings.md"""

from __future__ import annotations

from hvdlite.common.settings.config import settings
from hvdlite.common.settings.setting import Setting

HEAD = """# Settings

Every setting is an environment variable; most are a flag of `hvdlite-run` and a key of its config
file (`--config-file`), too. A flag wins over the config file, which wins over the variable. Those
with a \\* work as `HOROVOD_...`, too; `HVDLITE_...` wins. A wrong value is an error that names the
variable, before anything starts or at `init`.

| variable | default | flag | config file | meaning |
|---|---|---|---|---|
"""


def row(setting: Setting) -> str:
    """One line of the table."""
    flags = ", ".join(f"`{flag}`" for flag in (setting.flag, setting.no_flag) if flag)
    key = f"`{setting.yaml}`" if setting.yaml else ""
    alias = " \\*" if setting.alias else ""
    default = f"{setting.default}" if setting.has_default else ""
    return f"| `{setting.variable}`{alias} | {default} | {flags} | {key} | {setting.help} |\n"


def page() -> str:
    """The whole page."""
    return HEAD + "".join(map(row, settings()))


if __name__ == "__main__":
    print(page(), end="")
