"""Placement groups: which Ray nodes the ranks run on."""

from __future__ import annotations

from typing import Any, NamedTuple


class Workers(NamedTuple):
    """How many workers there are, and what each of them takes."""

    number: int
    per_host: int | None  # None: Ray places them, as closely together as it can
    cpus: float
    gpus: float

    def bundles(self) -> tuple[list[dict[str, float]], str]:
        """Return the bundles of a placement group of their own, and its strategy."""
        if self.per_host is None:
            return [self.resources(1)] * self.number, "PACK"
        return [self.resources(self.per_host)] * (self.number // self.per_host), "STRICT_SPREAD"

    def resources(self, workers: int) -> dict[str, float]:
        """Return what some workers take together."""
        wanted = {"CPU": self.cpus * workers, "GPU": self.gpus * workers}
        return {name: number for name, number in wanted.items() if number}

    def fit_into(self, bundle: dict[str, float]) -> int:
        """Return how many workers a bundle has room for."""
        wanted = self.resources(1)
        return int(min(bundle.get(name, 0) // number for name, number in wanted.items()))


class Placement(NamedTuple):
    """A placement group, and the bundle of each worker (-1: any that has room)."""

    group: Any
    bundles: list[int]
    own: bool  # it was made for these workers, and goes with them


def place(workers: Workers, use_current: bool, timeout_seconds: float) -> Placement:
    """Return the placement of `workers`: in the group that the caller runs in, or in a new one.

    Raises `ValueError` where the current group has too little room, and `TimeoutError` where the
    cluster has not made room for a new one in time.
    """
    import ray

    current = ray.util.get_current_placement_group() if use_current else None
    if current is not None and workers.per_host is None:
        room = sum(workers.fit_into(bundle) for bundle in current.bundle_specs)
        if room < workers.number:
            raise ValueError(
                f"the current placement group has room for {room} workers of "
                f"{workers.resources(1)}, and num_workers is {workers.number}: its bundles are "
                f"{current.bundle_specs}; give it more, or use_current_placement_group=False"
            )
        return Placement(current, [-1] * workers.number, own=False)
    bundles, strategy = workers.bundles()
    group = ray.util.placement_group(bundles, strategy=strategy)
    done, _ = ray.wait([group.ready()], timeout=timeout_seconds)
    if not done:
        ray.util.remove_placement_group(group)
        raise TimeoutError(
            f"Ray has found no room for {workers.number} workers in {timeout_seconds:g} s: the "
            f"placement group asks for {bundles} ({strategy}), available are "
            f"{ray.available_resources()}, in all {ray.cluster_resources()}; ask for fewer "
            "workers, or raise placement_group_timeout_s where the cluster is still growing"
        )
    per_bundle = workers.per_host or 1
    return Placement(group, [index // per_bundle for index in range(workers.number)], own=True)
