"""Slurm, LSF, PBS, Kubernetes, Kubeflow and torchrun: what they say, and how they start agents."""
