"""The variables that launchers set for rank 3 of 4."""

from __future__ import annotations

OPENMPI = {
    "PMIX_NAMESPACE": "prterun-a-1@1",
    "PMIX_RANK": "3",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM_PMI = {"PMI_RANK": "3", "PMI_SIZE": "4", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
NUMBERS = {"HVDLITE_RANK": "3", "HVDLITE_SIZE": "4"}
OWN = {
    **NUMBERS,
    "HVDLITE_LOCAL_RANK": "1",
    "HVDLITE_LOCAL_SIZE": "2",
    "HVDLITE_RENDEZVOUS": "unix:/run/hvdlite-1/meeting",
}
MASTER = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
TORCHRUN = {
    **MASTER,
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
# What a script in `sbatch` sees of its own, and a shell in `salloc` with an interactive step.
BATCH = {
    "SLURM_JOB_ID": "1234",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "node[07-08]",
}
INTERACTIVE = {**BATCH, "SLURM_STEP_ID": str(0xFFFFFFFA), "SLURM_STEP_NODELIST": "node07"}
SRUN = {
    **BATCH,
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
INDEXED_JOB = {
    "JOB_COMPLETION_INDEX": "3",
    "HVDLITE_SIZE": "4",
    "HVDLITE_RENDEZVOUS": "train-0.train:2222",
}
