"""hvdlite's own binding, by ctypes, to the NCCL and the CUDA runtime that a framework brought."""
