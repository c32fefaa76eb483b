"""What the fields of MPIJob, JobSet and Kubeflow Trainer are, and a check of whole manifests.

The operators' own definitions have 2.6 MB, nearly all of it copies of Kubernetes' pods and jobs.
Here stand the fields that the operators add. Pods, jobs and services are checked by
kubernetes-validate, strictly: a field that Kubernetes does not know is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

jsonschema = pytest.importorskip("jsonschema", reason="comes with kubernetes-validate")
kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="needs kubernetes-validate, of the extra 'test'"
)

VERSION = "1.33"  # of Kubernetes: in use for some time, and new enough for all that is used here
Schema = dict[str, Any]


def record(*required: str, **fields: Schema) -> Schema:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


def several(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def mapping(schema: Schema) -> Schema:
    return {"type": "object", "additionalProperties": schema}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def embedded(api_version: str, kind: str) -> Schema:
    """A template: an object of Kubernetes without its first two fields."""
    anything: Schema = {}
    fields = record("spec", metadata=anything, spec=anything)
    return {**fields, "kubernetes": {"apiVersion": api_version, "kind": kind}}


TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
QUANTITY: Schema = {
    "type": ["integer", "string"],
    "pattern": r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?[0-9]+))?$",  # noqa: E501
}
POD, JOB = embedded("v1", "Pod"), embedded("batch/v1", "Job")

MPI_REPLICA = record(
    "template", replicas=COUNT, template=POD, restartPolicy=one_of("Never", "OnFailure")
)
MPIJOB_SPEC = record(
    "mpiReplicaSpecs",
    slotsPerWorker=WHOLE,
    runLauncherAsWorker=FLAG,
    launcherCreationPolicy=one_of("AtStartup", "WaitForWorkersReady"),
    sshAuthMountPath=TEXT,
    mpiImplementation=one_of("OpenMPI", "Intel", "MPICH"),
    runPolicy=record(
        cleanPodPolicy=one_of("None", "Running", "All"),
        ttlSecondsAfterFinished=COUNT,
        activeDeadlineSeconds=WHOLE,
        backoffLimit=COUNT,
        schedulingPolicy=record(
            minAvailable=WHOLE,
            queue=TEXT,
            minResources=mapping(QUANTITY),
            priorityClass=TEXT,
            scheduleTimeoutSeconds=WHOLE,
        ),
        suspend=FLAG,
        managedBy=TEXT,
    ),
    mpiReplicaSpecs=record("Launcher", Launcher=MPI_REPLICA, Worker=MPI_REPLICA),
)
REPLICATED_JOB = record(
    "name",
    "template",
    name=TEXT,
    groupName=TEXT,
    replicas=COUNT,
    template=JOB,
    dependsOn=several(record("name", "status", name=TEXT, status=one_of("Ready", "Complete"))),
)
JOBSET_SPEC = record(
    replicatedJobs=several(REPLICATED_JOB),
    network=record(enableDNSHostnames=FLAG, subdomain=TEXT, publishNotReadyAddresses=FLAG),
    successPolicy=record(
        "operator", operator=one_of("All", "Any"), targetReplicatedJobs=several(TEXT)
    ),
    failurePolicy=record(
        maxRestarts=COUNT, restartStrategy=one_of("Recreate", "BlockingRecreate", "InPlaceRestart")
    ),
    startupPolicy=record("startupPolicyOrder", startupPolicyOrder=one_of("AnyOrder", "InOrder")),
    coordinator=record("replicatedJob", replicatedJob=TEXT, jobIndex=COUNT, podIndex=COUNT),
    managedBy=TEXT,
    suspend=FLAG,
    ttlSecondsAfterFinished=COUNT,
)
RUNTIME_SPEC = record(
    mlPolicy={
        **record(
            numNodes=WHOLE,
            mpi=record(
                numProcPerNode={"type": "integer", "minimum": 1},
                mpiImplementation=one_of("OpenMPI"),
                sshAuthMountPath=TEXT,
                runLauncherAsNode=FLAG,
            ),
            torch=record(),
        ),
        "not": {"required": ["mpi", "torch"]},
    },
    template=record(metadata={"type": "object"}, spec=JOBSET_SPEC),
)
RESOURCES = record(limits=mapping(QUANTITY), requests=mapping(QUANTITY))
TRAINJOB_SPEC = record(
    "runtimeRef",
    runtimeRef=record("name", name=TEXT, kind=TEXT, apiGroup=TEXT),
    trainer=record(
        image=TEXT,
        command=several(TEXT),
        args=several(TEXT),
        env=several(record("name", name=TEXT, value=TEXT, valueFrom={"type": "object"})),
        numNodes=COUNT,
        numProcPerNode={"type": "integer", "minimum": 1},
        resourcesPerNode=RESOURCES,
    ),
    suspend=FLAG,
    managedBy=TEXT,
    activeDeadlineSeconds=WHOLE,
)
METADATA = record(
    "name", name={"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 52},
    namespace=TEXT, labels=mapping(TEXT), annotations=mapping(TEXT),
)  # fmt: skip
SPECS = {
    ("kubeflow.org/v2beta1", "MPIJob"): MPIJOB_SPEC,
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): JOBSET_SPEC,
    ("trainer.kubeflow.org/v1alpha1", "ClusterTrainingRuntime"): RUNTIME_SPEC,
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): TRAINJOB_SPEC,
}


def errors(manifest: dict[str, Any]) -> list[str]:
    """Return what is wrong with a manifest: the path of each field, and what it should be."""
    spec = SPECS.get((manifest["apiVersion"], manifest["kind"]))
    if spec is None:
        return [f"{path}: {text}" for path, text in _known_to_kubernetes(manifest)]
    schema = record("spec", apiVersion=TEXT, kind=TEXT, metadata=METADATA, spec=spec)
    return [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
        for error in Validator(schema).iter_errors(manifest)
    ]


def _known_to_kubernetes(manifest: dict[str, Any]) -> Iterator[tuple[str, str]]:
    try:
        kubernetes_validate.validate(manifest, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield ".".join(map(str, error.path)), error.message


def _embedded(
    validator: Any, head: dict[str, str], template: dict[str, Any], schema: Schema
) -> Iterator[Any]:
    for path, text in _known_to_kubernetes({**head, "metadata": {}, **template}):
        yield jsonschema.ValidationError(text, path=path.split("."))


Validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"kubernetes": _embedded})
