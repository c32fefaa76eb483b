"""Tests of what Slurm, LSF, Kubernetes and others say, and of how they start agents."""
