"""The cores that a process may use, by its affinity and its container's limit, and its devices.

The count is a piece of shell, because each rank counts for itself: its host may have other limits
than the launcher's, and the shell around a rank is there already.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping

from hvdlite.common.base.errors import ConfigError

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


def cores(root: str = "") -> int:
    """Return how many cores this process may use, at least 1; a part of a core counts as none."""
    script = f'{count_cores_script(root)}echo "$cores $quota"'
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", script], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            env={name: text for name, text in os.environ.items() if not name.startswith("OMP_")},
            check=True,
        )  # fmt: skip
        found = [*map(int, done.stdout.split())]
        slurm = os.environ.get("SLURM_CPUS_ON_NODE", "")
        if slurm.isdecimal() and int(slurm):  # A cluster need not confine its jobs to these CPUs.
            found.append(int(slurm))
        return max(1, min(found))
    except (OSError, ValueError, subprocess.CalledProcessError):
        return os.cpu_count() or 1


# The accelerators that a rank may use, of those that its host or its job has.
#
# Both ways to start ranks use it: agents call `visible_devices`, and the shell of a rank under
# mpirun does the same in its own language.


SETTING = "HVDLITE_GPUS_PER_RANK"
# Of NVIDIA (AMD's library reads it as well), Ascend, Cambricon and Intel.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
    "MLU_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)


def visible_devices(environ: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """Return the variables that leave to a rank its own devices; none without the setting.

    Those that a variable lists already are divided, others are counted from 0. An empty variable
    lists none, as it does for the libraries. Raises `ConfigError` where too few are listed.
    """
    count = int(environ.get(SETTING) or 0)
    if count <= 0:
        return {}
    first = local_rank * count
    chosen = {}
    for name in VARIABLES:
        if name not in environ:
            chosen[name] = ",".join(map(str, range(first, first + count)))
            continue
        listed = [each.strip() for each in environ[name].split(",") if each.strip()]
        if len(listed) < first + count:
            last = first + count - 1
            needed = f"devices {first} to {last}" if count > 1 else f"device {first}"
            raise ConfigError(
                f"--gpus-per-rank {count}: the rank with local rank {local_rank} needs {needed} "
                f"of this host, and {name}={environ[name]} lists "
                f"{len(listed)}: start fewer ranks on the host, or list more devices"
            )
        chosen[name] = ",".join(listed[first : first + count])
    return chosen


# The same for the shell of a rank; `local_rank` is set.
SHELL = f"""\
if [ "${{{SETTING}:-0}}" -gt 0 ] && [ "$local_rank" ]; then
    first=$((local_rank * {SETTING}))
    for name in {" ".join(VARIABLES)}; do
        eval "given=\\${{$name+yes}} listed=\\$$name"
        listed=$(printf '%s' "$listed" | tr -d '[:space:]' | tr -s ,)
        listed=${{listed#,}} mine= index=0
        while [ "$index" -lt "${SETTING}" ]; do
            device=$((first + index))
            if [ "$given" ]; then
                device=$(printf '%s,' "$listed" | cut -d, -f $((device + 1)))
                if [ -z "$device" ]; then
                    echo "--gpus-per-rank ${SETTING}: $name=$listed lists too few devices for" \\
                        "local rank $local_rank: start fewer ranks here, or list more devices" >&2
                    exit 1
                fi
            fi
            mine="$mine${{mine:+,}}$device" index=$((index + 1))
        done
        export "$name=$mine"
    done
fi
"""
