"""A switch between network namespaces that delays packets, for kernels without netem.

Its ends are TUN devices. What the kernel hands to one of them goes a fixed time later, in order, to
the end whose number is the last part of its IPv4 address. Packets come unsegmented, up to 64 KiB at
a time, so that a gigabit per second each way is 4,000 reads and writes a second; that takes a part
of a core from what is measured.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
LARGEST_READ = 1 << 17  # a packet of 64 KiB, and its headers
VNET_HEADER = 10  # bytes before the packet
LAST_PART = VNET_HEADER + 19  # of the destination address


def open_tun(name: str) -> int:
    """Make a TUN device in this namespace, which ends with its descriptor. Raises `OSError`."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
        fcntl.ioctl(descriptor, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def before_all_others() -> None:
    """Let this thread have a core before anybody else: ranks that spin would delay the packets."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


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
