"""The parameter server for arrays of numpy: servers keep tensors, to which pushes are added.

import hvdlite.numpy.ps as ps

ps.init()
ps.push("counts", counts)
total = ps.pull("counts")
"""

from hvdlite.ps import public
from hvdlite.ps.public import *  # noqa: F403

__all__ = [*public.__all__]  # noqa: PLE0604 - they are strings
