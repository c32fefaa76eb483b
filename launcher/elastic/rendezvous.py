"""How workers ask for their places where a tool brings its own server for that."""

from __future__ import annotations

from hvdlite.launcher.elastic.driver import ElasticDriver
from hvdlite.launcher.elastic.registration import SlotInfo


class RendezvousHandler:
    """Answers workers that ask for their places."""

    def __init__(self, driver: ElasticDriver) -> None:
        self._driver = driver

    def get_rank_and_size(self, host: str, slot: int) -> SlotInfo:
        """Return the place of a worker in the next world, once that is decided."""
        self._driver.record_ready(host, slot)
        return self._driver.get_slot_info(host, slot)


def create_rendezvous_handler(driver: ElasticDriver) -> RendezvousHandler:
    """Return what answers the workers of a driver."""
    return RendezvousHandler(driver)
