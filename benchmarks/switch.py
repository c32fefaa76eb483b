"""A switch between many network namespaces that delays what it carries, for kernels without netem.

It is a `cable` with more than two ends: each is a TUN device, and a packet goes to the end whose
number is the last part of its IPv4 address.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from cable import LARGEST_READ, before_all_others, open_tun

VNET_HEADER = 10  # bytes before the packet
LAST_PART = VNET_HEADER + 19  # of the destination address


def carry(ends: Mapping[int, int], delay: float, stop: int) -> None:
    """Carry packets between `ends`, descriptors by their number, until `stop` can be read."""
    before_all_others()
    open_ends = dict(ends)
    carried: deque[tuple[float, int, bytes]] = deque()  # when it is due, where, and the packet
    while True:
        wait = None
        while carried:
            due, target, packet = carried[0]
            wait = due - time.monotonic()
            if wait > 0:
                break
            wait = None
            carried.popleft()
            with suppress(OSError):  # the device is down, or full: a switch loses such packets
                os.write(target, packet)
        ready, _, _ = select.select([*open_ends.values(), stop], [], [], wait)
        if stop in ready:
            return
        for source in ready:
            try:
                while True:
                    packet = os.read(source, LARGEST_READ)
                    target = open_ends.get(packet[LAST_PART]) if len(packet) > LAST_PART else None
                    if packet[VNET_HEADER] >> 4 == 4 and target is not None:
                        carried.append((time.monotonic() + delay, target, packet))
            except BlockingIOError:
                continue
            except OSError:  # The namespace that it was moved to is gone.
                open_ends = {n: end for n, end in open_ends.items() if end != source}


@contextmanager
def switch(names: Sequence[str], delay: float) -> Iterator[None]:
    """TUN devices of these `names`, numbered from 1, in this namespace, `delay` seconds apart.

    They may be moved to other namespaces. Raises `OSError` where there are no TUN devices.
    """
    ends: dict[int, int] = {}
    stop = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        for number, name in enumerate(names, 1):
            ends[number] = open_tun(name)
        thread = threading.Thread(target=carry, args=(ends, delay, stop), name="switch")
        thread.start()
        try:
            yield
        finally:
            os.eventfd_write(stop, 1)
            thread.join()
    finally:
        for descriptor in (*ends.values(), stop):
            os.close(descriptor)
