"""How many cores a process may use: by its affinity, and by the CPU limit of its container.

The count is a piece of shell, because each rank counts for itself: its host may have other limits
than the launcher's, and the shell around a rank is there already.
"""

from __future__ import annotations

import os
import shlex
import subprocess

# Sets `cores`, those of the affinity mask, and `quota`, the whole cores that the control groups of
# the process and of its ancestors leave: version 2 (cpu.max), and version 1 (cpu.cfs_quota_us).
COUNT_CORES = """\
{{
cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
quota=$cores
limit() {{
    if [ "$1" -gt 0 ] && [ "$2" -gt 0 ] && [ $(($1 / $2)) -lt "$quota" ]; then
        quota=$(($1 / $2))
    fi
}}
limits_of() {{
    limited=$2
    while :; do
        read -r most period <"$1$limited/cpu.max" && limit "$most" "$period"
        read -r most <"$1$limited/cpu.cfs_quota_us" &&
            read -r period <"$1$limited/cpu.cfs_period_us" && limit "$most" "$period"
        [ -n "$limited" ] || break
        limited=${{limited%/*}}
    done
}}
while IFS=: read -r number controllers group; do
    case ",$controllers," in
    ,,) limits_of {groups} "$group" ;;
    *,cpu,*) limits_of {groups}/cpu "$group"; limits_of {groups}/"$controllers" "$group" ;;
    esac
done <{own_groups}
}} 2>/dev/null
"""


def count_cores_script(root: str = "") -> str:
    """Return the piece of shell; `root` is put before the paths of the system, for tests."""
    return COUNT_CORES.format(
        groups=shlex.quote(f"{root}/sys/fs/cgroup"),
        own_groups=shlex.quote(f"{root}/proc/self/cgroup"),
    )


def print_cores_script(root: str = "") -> str:
    """Return the piece of shell that prints both counts; the smaller one may be used."""
    return f'{count_cores_script(root)}echo "$cores $quota"'


def cores(root: str = "") -> int:
    """Return how many cores this process may use, at least 1; a part of a core counts as none."""
    script = print_cores_script(root)
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", script], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            env={name: text for name, text in os.environ.items() if not name.startswith("OMP_")},
            check=True,
        )  # fmt: skip
        found = [*map(int, done.stdout.split()), *_cpus_of_slurm()]
        return max(1, min(found))
    except (OSError, ValueError, subprocess.CalledProcessError):
        return os.cpu_count() or 1


def _cpus_of_slurm() -> list[int]:
    """Return the CPUs of the job here; a cluster need not confine its jobs to them."""
    text = os.environ.get("SLURM_CPUS_ON_NODE", "")
    return [int(text)] if text.isdecimal() and int(text) else []
