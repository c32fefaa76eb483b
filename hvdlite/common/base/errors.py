"""The exceptions that a user of hvdlite can see."""

from __future__ import annotations

from typing import Any

# How the text of an error ends that only tells of another rank's departure: the launcher reads it,
# as such a rank is a victim.
DEPARTED = "and cannot take part any more"
NOT_INITIALIZED = "hvdlite has not been initialized; use hvd.init()"
HAS_SHUT_DOWN = "has been shut down"  # What such a text says before where nothing else is known.


class HorovodInternalError(RuntimeError):
    """A collective failed after it was accepted: a mismatch between ranks, a dead rank, a shutdown.

    ``rank`` is the global rank at fault where one is known. ``job_goes_on`` says that only this
    collective has failed, on all ranks alike: they do not agree about it, or one has left.
    """

    def __init__(
        self, message: str = "", rank: int | None = None, *, job_goes_on: bool = False
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.job_goes_on = job_goes_on


class UnsupportedError(ValueError, NotImplementedError):
    """A combination of arguments that no release has: for those who expect any of both."""


class PeerLostError(HorovodInternalError):
    """The connection to another rank ended: the rank died, or left without a departure."""


class ProtocolError(HorovodInternalError):
    """A peer sent a message that this version of hvdlite cannot have sent."""


class StalledError(HorovodInternalError):
    """Ranks have not submitted a tensor within the shutdown time of the stall inspector."""

    def __init__(self, text: str, late: tuple[int, ...]) -> None:
        super().__init__(text, rank=late[0])
        self.late = late


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - the name of Horovod
    """Hosts have come or gone: raised on all ranks at the same point, and nothing is undone.

    `skip_sync` says that ranks have only left, so that those who stay hold all state.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync
        # Whether the values were saved just before, so that saving them again is needless.
        self.values_are_saved = False


class HorovodVersionMismatchError(ImportError):
    """Two versions of hvdlite take part in one job."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(
            f"{name} {installed_version} is installed here, but another rank runs {version}: "
            f"install one version of {name} for all ranks"
        )
        self.name, self.version, self.installed_version = name, version, installed_version

    def __reduce__(self) -> tuple[Any, ...]:
        """Let copies be made: those of an error are made of its `args` else, which are its text."""
        return type(self), (self.name, self.version, self.installed_version)


class ConfigError(ValueError):
    """A setting has a wrong value. The text names the variable, flag or file that it came from."""
