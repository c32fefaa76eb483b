"""Ranks that an mpirun starts: which MPI, its command line, and a shell around each rank."""
