"""--install lets a whole environment answer to the name horovod, and pip can undo it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.parallel.jobs import MPIRUN, NO_MPIRUN, ROOT, environment, mpirun, run_command

ANSWERS = """
import importlib.metadata, sys
assert "hvdlite" not in sys.modules, "starting Python must not import hvdlite"
import horovod, horovod.numpy, hvdlite.numpy
from hvdlite.as_horovod import active
assert horovod.numpy is hvdlite.numpy and active()
print(horovod.__version__, importlib.metadata.version("horovod"))
"""


class Environment:
    """A virtual environment that sees this checkout and what it needs."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self.python = folder / "bin" / "python"
        self.horovodrun = folder / "bin" / "horovodrun"
        self.site = Path(next(folder.glob("lib/python*/site-packages")))
        paths = [str(ROOT), sysconfig.get_path("purelib")]
        (self.site / "seen.pth").write_text("\n".join(paths) + "\n")
        self.before = self.files()

    def files(self) -> set[Path]:
        """The files of the environment that count: not what Python compiles by itself."""
        paths = self.python.parent.parent.rglob("*")
        return {path for path in paths if path.suffix != ".pyc" and path.is_file()}

    def run(self, *words: str, code: int = 0) -> str:
        """What the environment's Python prints; it must end with `code`."""
        done = subprocess.run(
            [str(self.python), *words], env=clean(), cwd=self.site.parent, capture_output=True,
            text=True, timeout=200, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def change(self, flag: str, code: int = 0) -> str:
        """Install or uninstall the drop-in."""
        return self.run("-m", "hvdlite.as_horovod", flag, code=code)


def clean() -> dict[str, str]:
    """The environment of a shell: nothing makes hvdlite importable but the site-packages."""
    return {name: value for name, value in environment().items() if name != "PYTHONPATH"}


@pytest.fixture
def env(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "my env")


def test_every_process_answers(env: Environment) -> None:
    assert "installed in" in env.change("--install")
    assert env.run("-c", ANSWERS) == "0.28.1 0.28.1\n"
    assert env.run("-I", "-c", ANSWERS) == "0.28.1 0.28.1\n"
    env.change("--install")  # a second time changes nothing
    assert env.run("-c", ANSWERS) == "0.28.1 0.28.1\n"


def test_uninstall_leaves_nothing(env: Environment) -> None:
    env.change("--install")
    assert env.files() > env.before
    assert "removed from" in env.change("--uninstall")
    assert env.files() == env.before
    assert not list(env.site.rglob("*horovod*"))
    assert "nowhere" in env.change("--uninstall")
    assert "ModuleNotFoundError" in env.run("-c", "import horovod", code=1)


def test_pip_lists_and_uninstalls_it(env: Environment) -> None:
    pytest.importorskip("pip")
    env.change("--install")
    pip = ("-m", "pip", "--disable-pip-version-check")
    assert "horovod==0.28.1" in env.run(*pip, "list", "--format=freeze")
    required = env.run(*pip, "install", "--no-index", "horovod>=0.21", "horovod[pytorch]")
    assert "Requirement already satisfied: horovod>=0.21" in required
    assert "WARNING" not in required
    assert "Successfully uninstalled" in env.run(*pip, "uninstall", "--yes", "horovod")
    assert env.files() == env.before
    assert not list(env.site.rglob("*horovod*"))


def test_nothing_breaks_when_hvdlite_is_uninstalled(env: Environment) -> None:
    env.change("--install")
    (env.site / "seen.pth").unlink()
    assert env.run("-c", "print('started')") == "started\n"
    shown = env.run("-c", "import horovod", code=1)
    assert "ModuleNotFoundError: No module named 'horovod'" in shown


@pytest.mark.parametrize("kind", ["installed by pip", "on the path"])
def test_a_real_horovod_is_left_alone(env: Environment, kind: str) -> None:
    if kind == "installed by pip":
        folder = env.site / "horovod-0.27.0.dist-info"
        folder.mkdir()
        (folder / "INSTALLER").write_text("pip\n")
    else:
        folder = env.site / "horovod"
        folder.mkdir()
        (folder / "__init__.py").write_text("__version__ = '0.27.0'\n")
    files = env.files()
    shown = env.change("--install", code=1)
    assert str(folder) in shown and "pip uninstall horovod" in shown
    env.change("--uninstall")
    assert env.files() == files


def test_an_environment_that_cannot_be_written(env: Environment) -> None:
    (env.site / "horovod-stubs").write_text("in the way")
    shown = env.change("--install", code=1)
    assert "horovod-stubs" in shown and "Traceback" not in shown
    assert env.run("-c", "print('started')") == "started\n"
    assert "ModuleNotFoundError" in env.run("-c", "import horovod", code=1)


def test_type_checkers_know_the_names(env: Environment) -> None:
    pytest.importorskip("mypy")
    pytest.importorskip("torch", reason="the extra 'torch' is not installed")
    env.change("--install")
    script = env.site.parent / "typed.py"
    script.write_text(
        "import horovod\n"
        "import horovod.torch as hvd\n"
        "from horovod.common.exceptions import HorovodInternalError\n"
        "from horovod.torch.mpi_ops import allreduce\n"
        "reveal_type(hvd.rank())\n"
        "reveal_type(horovod.__version__)\n"
        "hvd.nonsense\n"
    )
    # The types of PyTorch take a minute to read, and those of hvdlite are what is asked for.
    config = env.site.parent / "mypy.ini"
    config.write_text("[mypy]\n[mypy-torch.*,numpy.*]\nfollow_imports = skip\n")
    stubs = {"MYPYPATH": str(ROOT)}  # a checkout is no installed package with types
    done = subprocess.run(
        [sys.executable, "-m", "mypy", f"--config-file={config}", f"--cache-dir={env.site}/cache",
         f"--python-executable={env.python}", "--follow-imports=silent", str(script)],
        env={**clean(), **stubs}, capture_output=True, text=True, timeout=220, check=False,
    )  # fmt: skip
    assert 'Revealed type is "int"' in done.stdout.replace("builtins.", ""), done.stdout
    assert done.stdout.count("error") == 2 and '"nonsense"' in done.stdout, done.stdout


@pytest.mark.skipif(MPIRUN is None, reason=NO_MPIRUN)
def test_plain_mpirun_and_horovodrun(env: Environment) -> None:
    env.change("--install")
    script = env.site.parent / "train.py"
    script.write_text(
        "import horovod.numpy as hvd, numpy\n"
        "hvd.init()\n"
        "print('sum', int(hvd.allreduce(numpy.ones(1), op=hvd.Sum)[0]), flush=True)\n"
    )
    path = os.pathsep.join([str(Path(str(MPIRUN)).parent), os.environ["PATH"]])
    done = run_command(mpirun(2, str(env.python), str(script)), PYTHONPATH="")
    assert done.stdout.count("sum 2") == 2, done.stdout
    command = [str(env.horovodrun), "-np", "2", str(env.python), str(script)]
    done = run_command(command, PYTHONPATH="", PATH=path)
    assert done.stdout.count("sum 2") == 2, done.stdout
    assert run_command([str(env.horovodrun), "--version"], PYTHONPATH="").stdout == "0.28.1\n"
