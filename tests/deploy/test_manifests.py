"""The manifests for Kubernetes: fields, and what their parts must have in common."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hvdlite.common.connections.address import Address
from hvdlite.common.meeting.detection import detect
from hvdlite.launcher.command_line.flags import parse_args
from hvdlite.ps.cluster.settings import read_settings
from tests.deploy.schemas import errors

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "deploy" / "kubernetes"
MANIFESTS = {
    f"{path.name} {manifest['kind']} {manifest['metadata']['name']}": manifest
    for path in sorted(FOLDER.glob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text())
}
PORT, UID, KEYS = 2222, 1000, "/home/mpiuser/.ssh"
every_manifest = pytest.mark.parametrize("manifest", MANIFESTS.values(), ids=MANIFESTS)


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [manifest for manifest in MANIFESTS.values() if manifest["kind"] == kind]


def find(node: Any, key: str) -> Iterator[Any]:
    """Every value of a key, wherever it is."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name == key:
                yield value
            yield from find(value, key)
    elif isinstance(node, list):
        for value in node:
            yield from find(value, key)


def pods(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The specs of the pods that a manifest makes."""
    return [
        template["spec"]
        for template in find(manifest, "template")
        if "containers" in template.get("spec", {})
    ]


def variables(container: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


def test_each_way_has_its_manifest() -> None:
    kinds = {manifest["kind"] for manifest in MANIFESTS.values()}
    assert kinds == {
        "MPIJob", "Service", "Job", "JobSet", "ClusterTrainingRuntime", "TrainJob"
    }  # fmt: skip
    policies = [set(runtime["spec"]["mlPolicy"]) for runtime in of_kind("ClusterTrainingRuntime")]
    assert policies == [{"numNodes", "mpi"}, {"numNodes", "torch"}]


@every_manifest
def test_the_fields_are_those_of_the_operators(manifest: dict[str, Any]) -> None:
    assert errors(manifest) == []


NODE_POD = "spec.template.spec.replicatedJobs.0.template.spec.template.spec"
MISTAKES: list[tuple[str, str, Any, str]] = [
    # kind, path of a field, another value, what the error names
    ("MPIJob", "spec.slotPerWorker", 2, "slotPerWorker"),
    ("MPIJob", "spec.mpiImplementation", "openmpi", "spec.mpiImplementation: 'openmpi'"),
    ("MPIJob", "spec.slotsPerWorker", "2", "spec.slotsPerWorker: '2'"),
    ("MPIJob", "spec.runPolicy.cleanPodPolicy", "Never", "cleanPodPolicy"),
    ("MPIJob", "spec.mpiReplicaSpecs.Worker.replicas", "2", "Worker.replicas: '2'"),
    ("MPIJob", "spec.mpiReplicaSpecs.Worker.restartPolicy", "Always", "'Always'"),
    ("MPIJob", "spec.mpiReplicaSpecs.Workers", {}, "Workers"),
    ("MPIJob", "spec.mpiReplicaSpecs.Worker.template.spec.containers.0.comand", ["x"],
     "mpiReplicaSpecs.Worker.template.spec.containers.0: .*comand"),
    ("MPIJob", "spec.mpiReplicaSpecs.Launcher.template.spec.containers.0.args", "x", "args: 'x'"),
    ("MPIJob", "metadata.name", "My_Job", "metadata.name"),
    ("Service", "spec.publishNotReadyAdresses", True, "publishNotReadyAdresses"),
    ("Job", "spec.completions", "four", "completions"),
    ("Job", "spec.template.spec.containers.0.volumeMounts.0.path", "/x", "path"),
    ("JobSet", "spec.failurePolicy.restartStrategy", "Blocking", "restartStrategy: 'Blocking'"),
    ("JobSet", "spec.replicatedJobs.2.template.spec.completionMod", "Indexed",
     "replicatedJobs.2.template.spec: .*completionMod"),
    ("JobSet", "spec.replicatedJobs.2.dependsOn", [{"name": "x", "status": "ready"}], "'ready'"),
    ("ClusterTrainingRuntime", "spec.mlPolicy.torch", {}, "spec.mlPolicy"),
    ("ClusterTrainingRuntime", f"{NODE_POD}.user", 1000, "user"),
    ("TrainJob", "spec.trainer.numProcPerNode", 0, "numProcPerNode: 0"),
    ("TrainJob", "spec.trainer.resourcesPerNode.limits.memory", "4GiB", "memory: '4GiB'"),
    ("TrainJob", "spec.runtimeRef", {}, "'name' is a required property"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "path", "value", "named"), MISTAKES)
def test_a_mistake_is_found(kind: str, path: str, value: Any, named: str) -> None:
    manifest = copy.deepcopy(of_kind(kind)[0])
    node: Any = manifest
    *way, last = path.split(".")
    for step in way:
        node = node[int(step) if isinstance(node, list) else step]
    node[last] = value
    assert any(re.search(named, error) for error in errors(manifest)), errors(manifest)


@every_manifest
def test_pods_run_as_the_user_of_the_image(manifest: dict[str, Any]) -> None:
    assert pods(manifest) or manifest["kind"] in ("Service", "TrainJob")
    for pod in pods(manifest):
        context = pod["securityContext"]
        assert (context["runAsUser"], context["runAsGroup"]) == (UID, UID)
        assert context["runAsNonRoot"] is True
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }


@every_manifest
def test_the_parts_of_a_pod_fit(manifest: dict[str, Any]) -> None:
    for pod in pods(manifest):
        assert pod.get("restartPolicy", "Never") in ("Never", "OnFailure")
        volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
        for container in pod["containers"]:
            assert "command" not in container  # it would replace the init process of the image
            mounts = container.get("volumeMounts", [])
            assert {mount["name"] for mount in mounts} == volumes.keys()
            for mount in mounts:
                if mount["mountPath"] == "/snapshots":  # On the disk of the node.
                    assert volumes[mount["name"]]["emptyDir"] == {}
                    continue
                assert mount["mountPath"] == "/dev/shm"
                assert volumes[mount["name"]]["emptyDir"]["medium"] == "Memory"
            ports = {port["name"] for port in container.get("ports", [])}
            assert {probe["port"] for probe in find(container, "tcpSocket")} <= ports


@every_manifest
def test_the_commands_can_be_run(manifest: dict[str, Any]) -> None:
    found = 0
    for args in find(manifest, "args"):
        assert all(isinstance(word, str) for word in args)
        words = parse_args(args[1:]).command if args[0] == "hvdlite-run" else args
        if words[0] == "/usr/sbin/sshd":
            assert words == ["/usr/sbin/sshd", "-De", "-f", "/home/mpiuser/.sshd_config"]
        elif words[0] == "hvdlite-ps":
            assert words == ["hvdlite-ps", "scheduler"]
        else:
            program, script = words[:2]
            assert program in ("python", "torchrun")
            assert (ROOT / script).is_file()
        found += 1
    assert found or manifest["kind"] in ("Service", "ClusterTrainingRuntime")


def test_the_ports_keys_and_user_are_those_of_the_image() -> None:
    dockerfile = (FOLDER / "Dockerfile").read_text()
    client, server = ((FOLDER / name).read_text() for name in ("ssh_config", "sshd_config"))
    assert f"--uid {UID} " in dockerfile and f"USER {UID}:{UID}" in dockerfile
    assert f"    Port {PORT}\n" in client
    assert f"\nPort {PORT}\n" in server
    assert f"\nHostKey {KEYS}/id_rsa\n" in server
    assert f"\nAuthorizedKeysFile {KEYS}/authorized_keys\n" in server
    assert {*find([*MANIFESTS.values()], "sshAuthMountPath")} == {KEYS}
    ports = [
        port["containerPort"] for each in find([*MANIFESTS.values()], "ports") for port in each
        if port.get("name") == "ssh"
    ]  # fmt: skip
    assert ports == [PORT, PORT]
    images = {*find([*MANIFESTS.values()], "image")}
    assert images == {"hvdlite:0.1"}


def test_the_indexed_job_meets_at_its_first_pod() -> None:
    (service,), (job,) = of_kind("Service"), of_kind("Job")
    name, spec = job["metadata"]["name"], job["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert spec["completionMode"] == "Indexed"
    subdomain = spec["template"]["spec"]["subdomain"]
    assert service["metadata"]["name"] == subdomain
    _meets(container, f"{name}-0.{subdomain}", spec)


def test_the_roles_of_the_jobset_form_a_cluster() -> None:
    (jobset,) = of_kind("JobSet")
    spec = jobset["spec"]
    roles = {job["name"]: job for job in spec["replicatedJobs"]}
    assert list(roles) == ["scheduler", "server", "worker"]
    assert spec["successPolicy"]["targetReplicatedJobs"] == ["worker"]
    prefix, subdomain = jobset["metadata"]["name"], spec["network"]["subdomain"]
    found = {}
    for name, role in roles.items():
        assert role["replicas"] == 1
        job = role["template"]["spec"]
        (container,) = job["template"]["spec"]["containers"]
        given = variables(container)
        assert given["HVDLITE_PS_TOKEN"]["secretKeyRef"]["key"] == "secret"
        texts = {key: text for key, text in given.items() if isinstance(text, str)}
        settings = read_settings({"HVDLITE_ROLE": "scheduler", **texts})
        assert settings is not None and settings.role == name and not settings.independent
        found[name] = (settings.scheduler, settings.num_servers, settings.num_workers)
        assert job["completions"] == job["parallelism"]
    host = f"{prefix}-scheduler-0-0.{subdomain}"
    servers, workers = (
        roles[name]["template"]["spec"]["completions"] for name in ("server", "worker")
    )
    (scheduler,) = roles["scheduler"]["template"]["spec"]["template"]["spec"]["containers"]
    (port,) = (port["containerPort"] for port in scheduler["ports"])
    assert set(found.values()) == {(f"{host}:{port}", servers, workers)}
    assert scheduler["args"] == ["hvdlite-ps", "scheduler"]
    job = roles["worker"]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    _meets(container, f"{prefix}-worker-0-0.{subdomain}", job)
    server = roles["server"]["template"]["spec"]["template"]["spec"]
    assert server["restartPolicy"] == "OnFailure"
    (container,) = server["containers"]
    (mount,) = container["volumeMounts"]
    assert mount["mountPath"] == variables(container)["HVDLITE_PS_SNAPSHOT"]


def _meets(container: dict[str, Any], host: str, job: dict[str, Any]) -> None:
    given = variables(container)
    (port,) = (port["containerPort"] for port in container["ports"])
    assert given["HVDLITE_RENDEZVOUS"] == f"{host}:{port}"
    assert given["HVDLITE_SIZE"] == str(job["completions"]) == str(job["parallelism"])
    assert given["HVDLITE_SECRET"]["secretKeyRef"]["key"] == "secret"
    assert job["backoffLimit"] == 0
    texts = {name: text for name, text in given.items() if isinstance(text, str)}
    for index in range(job["completions"]):
        launch = detect({**texts, "JOB_COMPLETION_INDEX": str(index)})
        assert (launch.rank, launch.size) == (index, job["completions"])
        assert launch.addresses == (Address(host, port),)
        assert launch.rank_0_serves


@every_manifest
def test_no_manifest_holds_a_secret(manifest: dict[str, Any]) -> None:
    for entries in find(manifest, "env"):
        for entry in entries:
            secret = entry["name"] in ("HVDLITE_SECRET", "HVDLITE_PS_TOKEN")
            assert not secret or "value" not in entry


def test_the_jobs_of_trainer_have_their_runtimes() -> None:
    runtimes = {
        each["metadata"]["name"]: each["spec"] for each in of_kind("ClusterTrainingRuntime")
    }
    commands = {}
    for job in of_kind("TrainJob"):
        runtime = runtimes[job["spec"]["runtimeRef"]["name"]]
        commands[job["spec"]["trainer"]["args"][0]] = set(runtime["mlPolicy"]) - {"numNodes"}
    assert commands == {"hvdlite-run": {"mpi"}, "torchrun": {"torch"}}
    for spec in runtimes.values():
        # Trainer puts the command of a job where this label is, into the container `node`.
        jobs = spec["template"]["spec"]["replicatedJobs"]
        trainers = [
            job for job in jobs
            if job["template"].get("metadata", {}).get("labels", {})
            == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
        ]  # fmt: skip
        assert len(trainers) == 1
        for job in jobs:
            assert [
                c["name"] for c in job["template"]["spec"]["template"]["spec"]["containers"]
            ] == ["node"]


@every_manifest
def test_jobs_depend_on_jobs_before_them(manifest: dict[str, Any]) -> None:
    for jobs in find(manifest, "replicatedJobs"):
        for at, job in enumerate(jobs):
            wanted = {each["name"] for each in job.get("dependsOn", [])}
            assert wanted <= {before["name"] for before in jobs[:at]}


def test_the_names_of_workers_are_names_of_dns() -> None:
    for job in of_kind("MPIJob"):
        workers = job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
        assert len(f"{job['metadata']['name']}-worker-{workers - 1}") <= 63
