"""The accelerators that a rank may use, of those that its host or its job has.

Both ways to start ranks use it: agents call `visible_devices`, and the shell of a rank under mpirun
does the same in its own language.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvdlite.common.base.errors import ConfigError

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

    Those that a variable lists already are divided, others are counted from 0. Raises `ConfigError`
    where too few are listed.
    """
    count = int(environ.get(SETTING) or 0)
    if count <= 0:
        return {}
    first = local_rank * count
    chosen = {}
    for name in VARIABLES:
        listed = [each.strip() for each in environ.get(name, "").split(",") if each.strip()]
        if listed and len(listed) < first + count:
            last = first + count - 1
            needed = f"devices {first} to {last}" if count > 1 else f"device {first}"
            raise ConfigError(
                f"--gpus-per-rank {count}: the rank with local rank {local_rank} needs {needed} "
                f"of this host, and {name}={environ[name]} lists "
                f"{len(listed)}: start fewer ranks on the host, or list more devices"
            )
        mine = listed[first : first + count] or map(str, range(first, first + count))
        chosen[name] = ",".join(mine)
    return chosen


# The same for the shell of a rank; `local_rank` is set.
SHELL = f"""\
if [ "${{{SETTING}:-0}}" -gt 0 ] && [ "$local_rank" ]; then
    first=$((local_rank * {SETTING}))
    for name in {" ".join(VARIABLES)}; do
        eval "listed=\\$$name"
        mine= index=0
        while [ "$index" -lt "${SETTING}" ]; do
            device=$((first + index))
            if [ "$listed" ]; then
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
