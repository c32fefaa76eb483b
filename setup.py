"""Build entry: pyproject.toml declares everything but the README and the compiled kernel.

A package index shows the README without the repository around it, so links and pictures that are
relative in README.md become addresses in the repository.

A wheel that is built where there is a C++ compiler for its platform has the kernel, compiled for
several processors (`hvdlite/common/collectives/native/kernel.py`), and the tag of the platform. It
is pure where there is none. So are the sdist and editable installs, whose users compile it.
"""

import importlib.util
import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

NATIVE = Path("hvdlite", "common", "collectives", "native")
REPOSITORY = "https://github.com/hvdlite/hvdlite"
PAGE, PICTURE = f"{REPOSITORY}/blob/main/", f"{REPOSITORY}/raw/main/"
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\[\]]*)\]\((?!#|[a-z]+:)(?P<target>[^()\s]+)\)")


def readme() -> str:
    """Return README.md with absolute links."""

    def complete(link: re.Match[str]) -> str:
        base = PICTURE if link["picture"] else PAGE
        return f"{link['picture']}[{link['text']}]({base}{link['target']})"

    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    return LINK.sub(complete, text)


@cache
def native(name: str) -> ModuleType:
    """Return a module of the package, which cannot be imported where numpy is missing."""
    path = Path(__file__).parent / NATIVE / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"hvdlite_build_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_kernel(platform: str) -> dict[str, bytes]:
    """Return the libraries for a platform ("linux_x86_64") by file name; print what fails."""
    kernel, tools = native("kernel"), native("compiler")
    system, _, machine = platform.replace("-", "_").partition("_")
    compiler = tools.find_compiler()
    if system != "linux" or compiler is None:
        return {}

    def compile_variant(variant: Any) -> bytes:
        try:
            library: bytes = tools.compile_library(compiler, kernel.sources(), variant.flags)
        except tools.CompilerError as error:
            print(f"warning: the kernel for {variant.title} is left out: {error}")
            return b""
        return library

    variants = kernel.VARIANTS.get(machine, ())
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        libraries = list(threads.map(compile_variant, variants))
    return {
        kernel.file_name(machine, variant): library
        for variant, library in zip(variants, libraries, strict=True)
        if kernel.is_library_for(machine, library)
    }


class KernelDistribution(Distribution):
    """A distribution whose wheel may have compiled code, which is no extension module."""

    has_kernel = False

    def has_ext_modules(self) -> bool:
        """Return whether the wheel is for one platform: it decides where `install` puts files."""
        return self.has_kernel or super().has_ext_modules()


class BuildWheel(bdist_wheel):
    """Builds a wheel, with the kernel where that can be compiled."""

    def run(self) -> None:
        """Compile before the build, and write among what it has built."""
        libraries = compile_kernel(self.plat_name)
        if libraries:
            self.distribution.has_kernel = True
            self.root_is_pure = False
        built = Path(self.get_finalized_command("build").build_lib)
        folder = built / NATIVE / native("kernel").SHIPPED
        for path in folder.glob("*.so"):  # of an earlier build
            path.unlink()
        for name, library in libraries.items():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(library)
            (folder / name).chmod(0o755)
        print(f"compiled for {self.plat_name}: {', '.join(libraries) or 'nothing'}")
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags: any Python can load the kernel, on its platform."""
        if not self.distribution.has_kernel:
            return super().get_tag()
        return self.python_tag, "none", self.plat_name.replace("-", "_")


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    distclass=KernelDistribution,
    cmdclass={"bdist_wheel": BuildWheel},
)
