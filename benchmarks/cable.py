"""A cable between two network namespaces that delays what it carries, for kernels without netem.

Its ends are TUN devices. What the kernel hands to one of them is written into the other one a fixed
time later, in order. Packets come unsegmented, up to 64 KiB at a time, so that a gigabit per second
each way is 4,000 reads and writes a second; that takes a part of a core from what is measured.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
LARGEST_READ = 1 << 17  # a packet of 64 KiB, and its headers


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


class Way:
    """One direction of the cable."""

    def __init__(self, source: int, target: int, delay: float) -> None:
        self.source = source
        self._target = target
        self._delay = delay
        self._carried: deque[tuple[float, bytes]] = deque()  # when it is due, and the packet

    def take(self) -> None:
        """Take all that the kernel has for this end."""
        with suppress(BlockingIOError):
            while True:
                packet = os.read(self.source, LARGEST_READ)
                self._carried.append((time.monotonic() + self._delay, packet))

    def give(self) -> float | None:
        """Give what is due to the other end; seconds until the next is, None if there is none."""
        while self._carried:
            due, packet = self._carried[0]
            left = due - time.monotonic()
            if left > 0:
                return left
            with suppress(OSError):  # the device is down, or full: a cable loses such packets
                os.write(self._target, packet)
            self._carried.popleft()
        return None


def before_all_others() -> None:
    """Let this thread have a core before anybody else: ranks that spin would delay the packets."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def carry(ways: Sequence[Way], stop: int) -> None:
    """Carry packets until `stop` can be read."""
    before_all_others()
    sources = {way.source: way for way in ways}
    while True:
        waits = [left for way in ways if (left := way.give()) is not None]
        ready, _, _ = select.select([*sources, stop], [], [], min(waits, default=None))
        if stop in ready:
            return
        for source in ready:
            sources[source].take()


@contextmanager
def cable(names: Sequence[str], delay: float) -> Iterator[None]:
    """TUN devices of these two `names` in this namespace, `delay` seconds apart.

    They may be moved to other namespaces. Raises `OSError` where there are no TUN devices.
    """
    ends = []
    stop = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        for name in names:
            ends.append(open_tun(name))
        a, b = ends
        ways = (Way(a, b, delay), Way(b, a, delay))
        thread = threading.Thread(target=carry, args=(ways, stop), name="cable")
        thread.start()
        try:
            yield
        finally:
            os.eventfd_write(stop, 1)
            thread.join()
    finally:
        for descriptor in (*ends, stop):
            os.close(descriptor)
