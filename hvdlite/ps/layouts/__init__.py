"""Which server keeps which part of which tensor, and the flat blocks of it that lie there."""
