"""Files of saved tables, for snapshots and checkpoints: one writer, and one reader.

A file has the arrays of a `SavedTable` in the format of safetensors, and as its metadata what is to
be said of them, with their checksums. Nothing is unpickled.

`hvdlite.checkpoint.files` does not serve here, as it needs the library of safetensors, which a
server has not where hvdlite is installed without extras, and which copies what it writes; nor does
this serve there, as others read those files by the dtypes and shapes of their tensors.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from hvdlite.ps.connections import system
from hvdlite.ps.tables.saved import SavedTable

SUFFIX = ".safetensors"


def write(path: Path, saved: SavedTable) -> tuple[int, int]:
    """Write a file, which is on disk when this returns. Raises OSError.

    Return its size, and a checksum of its metadata, which has those of all arrays.

    Servers go on meanwhile, as it is written without a copy: the library of safetensors copies the
    arrays, for which it holds Python's lock.
    """
    about, arrays = saved.pack()
    raws = [array.reshape(-1).view(np.uint8).data for array in arrays]
    about["checksums"] = [*map(zlib.crc32, raws)]
    header: dict[str, Any] = {"__metadata__": {"about": json.dumps(about)}}
    start = 0
    for number, raw in enumerate(raws):
        place = [start, start + raw.nbytes]
        header[str(number)] = {"dtype": "U8", "shape": [raw.nbytes], "data_offsets": place}
        start += raw.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    size = system.write_whole(path, [len(head).to_bytes(8, "little") + head, *raws])
    return size, zlib.crc32(head)


def read(path: Path, *, verify: bool = True) -> SavedTable:
    """Return what a file has. Its arrays come from the disk when somebody looks at them.

    With `verify`, all bytes are compared with their checksums now. Raises OSError, and ValueError
    for a file that is damaged.
    """
    try:
        raw = np.memmap(path, np.uint8, "r")
        start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
        header = json.loads(raw[8:start].tobytes())
        about = json.loads(header["__metadata__"]["about"])
        places = [header[str(number)]["data_offsets"] for number in range(len(about["arrays"]))]
        raws = [raw[start + first : start + stop] for first, stop in places]
        if verify and [zlib.crc32(each.data) for each in raws] != about["checksums"]:
            raise ValueError("its bytes are not those that were saved")
        return SavedTable.unpack(about, raws)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
