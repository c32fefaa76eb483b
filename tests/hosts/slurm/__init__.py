"""Jobs under real Slurm, on a cluster of simulated hosts."""
