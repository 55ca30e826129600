"""What deploys the sidecar is linted, held against its schemas, and where it can be, run."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import smartsearch_sidecar
from smartsearch_sidecar.config import load
from smartsearch_sidecar.doctor.machine import OTHER_DESCRIPTORS
from tests.fakes.process import ROOT, environment, running, toml
from tests.fakes.served import read_records

CONFIG = ROOT / "config"
MANIFESTS = sorted((CONFIG / "kubernetes").glob("*.yaml"))
UNIT = CONFIG / "systemd" / "smartsearch-sidecar.service"
SLURM = CONFIG / "slurm" / "sidecar.sh"
DOCKERFILE = ROOT / "Dockerfile"
KUBERNETES = ("1.29", "1.34")  # the first with native sidecars switched on, and a recent one


def tool(name: str) -> str:
    """A linter of the development lock, beside this interpreter or on the path."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is missing: run `make setup`")
    return found


def lint(*words: str | Path) -> None:
    ended = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout + ended.stderr) == (0, "")


# --- Kubernetes ----------------------------------------------------------------------------------


@pytest.fixture
def manifests() -> dict[str, Any]:
    """Every document by kind and name."""
    yaml = pytest.importorskip("yaml", reason="pyyaml is missing: run `make setup`")
    documents = [
        document for path in MANIFESTS for document in yaml.safe_load_all(path.read_text("utf-8"))
    ]
    return {f"{item['kind']}/{item['metadata']['name']}": item for item in documents}


@pytest.fixture
def pod(manifests: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = manifests["Job/smartsearch-training"]["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("version", KUBERNETES)
def test_manifests_fit_their_schemas(manifests: dict[str, Any], version: str) -> None:
    """Each document is what Kubernetes takes, and has no field it would drop."""
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is missing: run `make setup`"
    )
    assert len(manifests) == 4
    for document in manifests.values():
        kubernetes_validate.validate(document, version, strict=True)


def test_the_sidecar_is_native_and_probed_by_its_own_listener(
    manifests: dict[str, Any], pod: dict[str, Any], tmp_path: Path
) -> None:
    """An init container that stays, ready by /readyz, alive by /livez, on the configured port."""
    (sidecar,) = pod["initContainers"]
    config = configured(manifests, tmp_path)
    assert sidecar["restartPolicy"] == "Always"
    assert "--resume" in sidecar["args"]
    assert sidecar["image"] == f"smartsearch-sidecar:{smartsearch_sidecar.__version__}"
    (port,) = sidecar["ports"]
    assert (port["containerPort"], config.server.probe_host) == (
        config.server.probe_port,
        "0.0.0.0",
    )
    paths = {name: sidecar[name]["httpGet"]["path"] for name in sidecar if name.endswith("Probe")}
    assert paths == {
        "startupProbe": "/readyz",
        "readinessProbe": "/readyz",
        "livenessProbe": "/livez",
    }
    assert pod["terminationGracePeriodSeconds"] > config.execute.deadline_seconds + 10


def configured(manifests: dict[str, Any], tmp_path: Path) -> Any:
    """The ConfigMap's text, loaded with capabilities as the Secret would give them."""
    text = manifests["ConfigMap/smartsearch-sidecar"]["data"]["sidecar.toml"]
    for name in ("execute", "internal"):
        (tmp_path / f"{name}.capability").write_text(name * 6)
    path = tmp_path / "sidecar.toml"
    path.write_text(text.replace("/secrets/", f"{tmp_path}/"))
    return load(path, environ={})


def test_every_mount_has_its_volume(
    manifests: dict[str, Any], pod: dict[str, Any], tmp_path: Path
) -> None:
    """Mounts name volumes, claims are made, and what the configuration names lies in a mount."""
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    containers = [*pod["initContainers"], *pod["containers"]]
    mounted = {mount["name"] for container in containers for mount in container["volumeMounts"]}
    assert mounted == set(volumes)
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for volume in volumes.values()
        if "persistentVolumeClaim" in volume
    }
    assert {f"PersistentVolumeClaim/{claim}" for claim in claims} <= set(manifests)
    config = configured(manifests, tmp_path)
    places = {
        Path(mount["mountPath"]): mount.get("readOnly", False)
        for mount in pod["initContainers"][0]["volumeMounts"]
    }
    assert places[config.run.directory.parent] is False
    assert places[config.retrieval.bm25.index.parent] is True


def test_rollout_code_is_kept_from_the_answers(pod: dict[str, Any]) -> None:
    """The trainer is another user, mounts neither runs nor capabilities, and gets no proxies."""
    (sidecar,), (trainer,) = pod["initContainers"], pod["containers"]
    assert sidecar["securityContext"]["runAsUser"] != trainer["securityContext"]["runAsUser"]
    assert sidecar["securityContext"]["readOnlyRootFilesystem"] is True
    names = {mount["name"] for mount in trainer["volumeMounts"]}
    assert names == {"endpoints", "own-endpoints"}
    env = {item["name"]: item["value"] for item in trainer["env"]}
    assert env["NO_PROXY"] == env["no_proxy"] == "127.0.0.1,localhost"


# --- systemd -------------------------------------------------------------------------------------


def unit() -> dict[str, list[str]]:
    """Keys of [Service], each with its values; continued lines joined."""
    text = UNIT.read_text("utf-8").replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for line in text.partition("[Service]")[2].partition("[Install]")[0].splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(" ".join(value.split()))
    return found


@pytest.mark.may_skip("systemd is not on every machine")
def test_the_unit_is_one(tmp_path: Path) -> None:
    """systemd itself has nothing to say against it, but that the program is elsewhere here."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is missing")
    copy = tmp_path / UNIT.name
    text = UNIT.read_text("utf-8")
    program = "/opt/smartsearch-sidecar/bin/smartsearch-sidecar"
    assert program in text
    copy.write_text(text.replace(program, sys.executable))
    lint("systemd-analyze", "verify", "--man=no", copy)


def test_the_unit_resumes_and_never_restarts_a_failed_run() -> None:
    """It starts or resumes, a closed latch and wrong use stay down, and it may hold connections."""
    service = unit()
    (command,) = service["ExecStart"]
    assert shlex.split(command)[1] == "serve"
    assert "--resume" in shlex.split(command)
    assert service["Restart"] == ["on-failure"]
    assert service["RestartPreventExitStatus"] == ["2 4"]
    connections = load(
        None, overrides={"retrieval.bm25.index": "/index"}, environ={}
    ).server.connections_max
    assert int(service["LimitNOFILE"][0]) >= connections + OTHER_DESCRIPTORS
    assert service["UMask"] == ["0077"]
    assert shlex.split(command)[shlex.split(command).index("--run-dir") + 1].startswith(
        f"/var/lib/{service['StateDirectory'][0]}/"
    )


def test_the_unit_hands_over_the_capabilities(tmp_path: Path) -> None:
    """The variables it sets are keys of the configuration, and name the credentials it loads."""
    service = unit()
    loaded = [value.partition(":")[0] for value in service["LoadCredential"]]
    for name in loaded:
        (tmp_path / name).write_text(name.partition(".")[0] * 6)
    environ = dict(
        value.replace("%d", str(tmp_path)).split("=", 1) for value in service["Environment"]
    )
    config = load(None, overrides={"retrieval.bm25.index": "/index"}, environ=environ)
    assert config.server.execute_capability is not None
    assert config.server.internal_capability is not None
    assert config.server.execute_capability != config.server.internal_capability


# --- Slurm ---------------------------------------------------------------------------------------

SRUN = """\
#!/usr/bin/env bash
# srun on one node: its options, then the command, signals handed on.
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""


def slurm(tmp_path: Path, *trainer: str, **keys: Any) -> subprocess.CompletedProcess[str]:
    """The script as the first node of a job runs it, with a real sidecar."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "srun").write_text(SRUN)
    sidecar = programs / "sidecar"
    sidecar.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m smartsearch_sidecar "$@"\n'
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    config = tmp_path / "sidecar.toml"
    values = {"server.port": 0, "retrieval.provider": "tests.fakes.plugin:instant"}
    config.write_text(toml({**values, **{k.replace("__", "."): v for k, v in keys.items()}}))
    return subprocess.run(
        [str(SLURM), *trainer],
        env={
            **environment(),
            "PATH": f"{programs}:{os.environ['PATH']}",
            "SIDECAR": "sidecar",
            "SIDECAR_CONFIG": str(config),
            "RUNS": str(tmp_path / "runs"),
            "SLURM_JOB_ID": "17",
            "READY_SECONDS": "30",
        },
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_the_script_is_clean() -> None:
    """It can be executed and parsed."""
    assert os.access(SLURM, os.X_OK)
    lint("bash", "-n", SLURM)


def test_the_script_is_linted() -> None:
    """shellcheck has nothing to say, hints included."""
    lint(tool("shellcheck"), SLURM)


def test_a_job_is_served_and_ends_in_order(tmp_path: Path) -> None:
    """The trainer reaches the sidecar, the gate passes, run.closed is recorded, and the job ends
    with the trainer's own code.
    """
    ended = slurm(tmp_path, "bash", "-c", "sidecar check && exit 7")
    assert ended.returncode == 7, ended.stderr
    assert ended.stdout.count("healthy: 0 of 0 searches answered") == 2
    kinds = [record["kind"] for record in read_records(tmp_path / "runs" / "17")]
    assert kinds == ["run.claimed", "run.closed"]


def test_a_latched_run_fails_the_job(tmp_path: Path) -> None:
    """A trainer that noticed nothing does not hide a closed latch."""
    ended = slurm(
        tmp_path, "sidecar", "latch", "--reason", "a test", "--run-dir", *run_of(tmp_path)
    )
    assert ended.returncode == 1, ended.stderr
    assert "keep no checkpoint" in ended.stderr


def run_of(tmp_path: Path) -> list[str]:
    return [str(tmp_path / "runs" / "17")]


def test_a_sidecar_that_cannot_begin_ends_the_job(tmp_path: Path) -> None:
    """The trainer is never started without one."""
    ended = slurm(tmp_path, "touch", str(tmp_path / "trained"), retrieval__provider="no.such:thing")
    assert ended.returncode == 1
    assert "did not become ready" in ended.stderr
    assert not (tmp_path / "trained").exists()


# --- the image -----------------------------------------------------------------------------------


def test_the_dockerfile_is_linted() -> None:
    """hadolint has nothing to say."""
    lint(tool("hadolint"), "--no-color", DOCKERFILE)


def test_the_image_is_made_of_what_is_here() -> None:
    """Copied files exist, every install is by hash or of our own wheel, and root is not kept."""
    text = DOCKERFILE.read_text("utf-8").replace("\\\n", " ")
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
    installs = re.findall(r"(?<=pip)[^&\n]*? install ([^&\n]*)", text)
    assert len(installs) == 3
    assert all("--require-hashes" in words or "--no-index" in words for words in installs)
    assert re.search(r"^USER \d+:\d+$", text, re.MULTILINE)
    assert text.rindex("USER ") > text.rindex("RUN ")


def test_the_health_check_asks_whether_it_lives(tmp_path: Path) -> None:
    """The image's own check passes on a served run, latched or not, and fails on a dead port."""
    text = DOCKERFILE.read_text("utf-8").replace("\\\n", " ")
    command = json.loads(text.partition("HEALTHCHECK")[2].partition("CMD")[2].splitlines()[0])
    assert ast.parse(command[2])

    def healthy(url: str) -> bool:
        env = {**os.environ, "SIDECAR_PROBE": url, "HTTP_PROXY": "http://127.0.0.1:1"}
        return (
            subprocess.run(
                [sys.executable, *command[1:]], env=env, capture_output=True, check=False
            ).returncode
            == 0
        )

    with running(tmp_path) as daemon:
        base = daemon.sandbox_url.rpartition("/")[0]
        assert daemon.internal().call("POST", "/latch", {"reason": "a test"}).status == 200
        assert healthy(f"{base}/livez")
        assert not healthy(f"{base}/readyz")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        assert not healthy(f"http://127.0.0.1:{nobody.getsockname()[1]}/livez")
