"""What --check-build prints: which frameworks, launchers, transports and so on work here."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points, packages_distributions, version
from typing import NamedTuple

from hvdlite.common.settings.config import DATA_PLANES, Config
from hvdlite.launcher.decisions.endings import signal_name
from hvdlite.launcher.mpirun.mpi import INSTALL_OPENMPI, Mpi, find_all

FRAMEWORKS = (
    ("NumPy", "numpy"),
    ("PyTorch", "torch"),
    ("TensorFlow", "tensorflow"),
    ("JAX", "jax"),
    ("Keras", "keras"),
    ("tf_keras (Keras 2)", "tf_keras"),
)
NEEDS_LINUX = "shm"  # memfd, and Unix sockets that pass descriptors
NEEDS_MPI = "mpi"
TRIAL_SECONDS = 300.0  # a trial may compile, and import TensorFlow


class CompiledPath(NamedTuple):
    """Compiled code that takes the place of Python where it works."""

    name: str
    setting: str  # of Config; "" where none turns it off
    trial: str  # a module and its words; see `hvdlite.tools.trials`
    package: str  # that it needs


TRIALS = "hvdlite.tools.trials"
COMPILED_PATHS = (
    CompiledPath("collectives by shared memory", "native", f"{TRIALS} shared_memory", "numpy"),
    CompiledPath(
        "TensorFlow operations", "tf_native", f"{TRIALS} tensorflow_operations", "tensorflow"
    ),
    CompiledPath("programs of JAX", "", f"{TRIALS} jax_programs", "jax"),
)
DEVICE_PATHS = (
    CompiledPath("PyTorch", "devices", f"{TRIALS} torch_devices", "torch"),
    CompiledPath("TensorFlow", "devices", f"{TRIALS} tensorflow_devices", "tensorflow"),
    CompiledPath("own binding", "devices", f"{TRIALS} own_binding", "numpy"),
)
DEVICE_PLUG_INS = "hvdlite.devices"  # The group of entry points.


def report(environ: Mapping[str, str]) -> str:
    """Return the text. Starts `mpirun --version`, and a process that tries each compiled path."""
    from hvdlite import __version__

    installed = packages_distributions()
    mpis = list(find_all(environ))
    no_mpi = "" if mpis else "there is no mpirun"  # Why ranks cannot communicate over MPI.
    if "mpi4py" not in installed:
        no_mpi = "mpi4py is not installed"
    mpi = f"MPI: {no_mpi}" if no_mpi else f"MPI (mpi4py {version('mpi4py')})"
    sections = {
        "Frameworks": [_package(name, package, installed) for name, package in FRAMEWORKS],
        "Launchers": list(_launchers(environ, mpis)),
        "Transports": [_mark(True, "TCP"), _mark(not no_mpi, mpi)],
        "Data planes": [
            _mark(_works(plane, no_mpi), plane) for plane in DATA_PLANES if plane != "auto"
        ],
        "Collectives on accelerators (without them tensors go through host memory)": [
            *(_compiled(path, environ, installed) for path in DEVICE_PATHS),
            *(
                _mark(True, f"plug-in {point.name} ({point.value})")
                for point in entry_points(group=DEVICE_PLUG_INS)
            ),
        ],
        "Compiled code (without it Python does the same, slower)": [
            _compiled(path, environ, installed) for path in COMPILED_PATHS
        ],
    }
    lines = [f"hvdlite {__version__}, Python {platform.python_version()} ({sys.executable})"]
    for title, rows in sections.items():
        lines += ["", f"{title}:", *(f"    {row}" for row in rows)]
    return "\n".join(lines)


def _launchers(environ: Mapping[str, str], mpis: Sequence[Mpi]) -> Iterator[str]:
    yield _mark(True, "agents on this host")
    for program, what in (("ssh", "agents on other hosts by ssh"), ("srun", "agents by srun")):
        path = shutil.which(program, path=environ.get("PATH"))
        yield _mark(bool(path), f"{what} ({path})" if path else what)
    for mpi in mpis:
        used = " <- used by --launcher mpirun" if mpi is mpis[0] else ""
        yield _mark(True, f"{mpi.name} ({mpi.program}){used}")
    if not mpis:
        yield _mark(False, f"mpirun, which most jobs do not need ({INSTALL_OPENMPI})")


def _works(plane: str, no_mpi: str) -> bool:
    if plane == NEEDS_MPI:
        return not no_mpi
    return plane != NEEDS_LINUX or sys.platform == "linux"


def _compiled(
    path: CompiledPath, environ: Mapping[str, str], installed: Mapping[str, list[str]]
) -> str:
    if path.package not in installed:
        return _mark(False, f"{path.name}: {path.package} is not installed")
    config = Config.from_environ(environ)
    if path.setting and getattr(config, path.setting) == "off":
        return _mark(False, f"{path.name}: HVDLITE_{path.setting.upper()}=off")
    works, text = _try(path.trial, environ)
    return _mark(works, f"{path.name}: {text}")


def _try(trial: str, environ: Mapping[str, str]) -> tuple[bool, str]:
    """Run a trial in a process of its own, which may crash. Return whether it works, and why."""
    process = subprocess.Popen(
        [sys.executable, "-m", *trial.split()],
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="backslashreplace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=TRIAL_SECONDS)
    except subprocess.TimeoutExpired:
        return False, f"it has not ended within {TRIAL_SECONDS:.0f} seconds"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the compiler that it runs, too
            process.communicate()
    if process.returncode < 0:
        return False, f"it was ended by {signal_name(-process.returncode)}"
    lines = [f"exit code {process.returncode}", *err.splitlines(), *out.splitlines()]
    return process.returncode == 0, lines[-1].strip()


def _package(name: str, package: str, installed: Mapping[str, list[str]]) -> str:
    """Return the line of a package, which several distributions may provide (tensorflow-cpu)."""
    if package not in installed:
        return _mark(False, name)
    distribution = installed[package][0]
    other = "" if distribution.lower() == package else f" ({distribution})"
    return _mark(True, f"{name} {version(distribution)}{other}")


def _mark(there: bool, text: str) -> str:
    return f"[{'X' if there else ' '}] {text}"
