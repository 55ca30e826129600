"""What deploys the sidecar is linted, held against its schemas, and where it can be, run."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import nats
import pytest

import smartsearch_sidecar
from smartsearch_sidecar.config import load
from smartsearch_sidecar.process.sockets import OTHER_DESCRIPTORS
from tests.fakes.nats_cluster import free_ports
from tests.fakes.nats_cluster import program as nats_server
from tests.fakes.process import ROOT, environment, running, toml
from tests.fakes.served import read_records
from tests.fakes.until import wait_until

CONFIG = ROOT / "config"
MANIFESTS = sorted((CONFIG / "kubernetes").glob("*.yaml"))
UNIT = CONFIG / "systemd" / "smartsearch-sidecar.service"
SLURM = CONFIG / "slurm" / "sidecar.sh"
SLURM_NATS = CONFIG / "slurm" / "nats.sh"
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


JOBS = {
    "smartsearch-training": "smartsearch-sidecar",
    "smartsearch-nodes": "smartsearch-sidecar-nodes",
}


@pytest.fixture(params=JOBS)
def job(request: pytest.FixtureRequest) -> str:
    """The job of one node, and that of many."""
    return str(request.param)


@pytest.fixture
def pod(manifests: dict[str, Any], job: str) -> dict[str, Any]:
    spec: dict[str, Any] = manifests[f"Job/{job}"]["spec"]["template"]["spec"]
    return spec


def environ(container: dict[str, Any], **given: str) -> dict[str, str]:
    """A container's variables as the kubelet makes them; ``given`` stands for what it looks up."""
    known: dict[str, str] = {}
    for item in container.get("env", []):
        value = item["value"] if "value" in item else given[item["name"]]
        known[item["name"]] = re.sub(
            r"\$\((\w+)\)", lambda match: known.get(match[1], match[0]), value
        )
    return known


@pytest.mark.parametrize("version", KUBERNETES)
def test_manifests_fit_their_schemas(manifests: dict[str, Any], version: str) -> None:
    """Each document is what Kubernetes takes, and has no field it would drop."""
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is missing: run `make setup`"
    )
    assert len(manifests) == 12
    for document in manifests.values():
        kubernetes_validate.validate(document, version, strict=True)


def test_the_sidecar_is_native_and_probed_by_its_own_listener(
    manifests: dict[str, Any], pod: dict[str, Any], job: str, tmp_path: Path
) -> None:
    """An init container that stays, started and alive by /livez, ready by /readyz: a latched run is
    alive and never ready, so the cluster does not restart it and its readiness shows it.
    """
    sidecar = pod["initContainers"][0]
    config = configured(manifests, job, tmp_path)
    assert sidecar["restartPolicy"] == "Always"
    assert "--resume" in sidecar["args"]
    assert "--trainer-stopped" not in sidecar["args"]  # the trainer is at work beside it
    assert sidecar["image"] == f"smartsearch-sidecar:{smartsearch_sidecar.__version__}"
    (port,) = sidecar["ports"]
    assert (port["containerPort"], config.server.probe_host) == (
        config.server.probe_port,
        "0.0.0.0",
    )
    paths = {name: sidecar[name]["httpGet"]["path"] for name in sidecar if name.endswith("Probe")}
    assert paths == {
        "startupProbe": "/livez",
        "readinessProbe": "/readyz",
        "livenessProbe": "/livez",
    }
    assert pod["terminationGracePeriodSeconds"] > config.execute.deadline_seconds + 10


def configured(manifests: dict[str, Any], job: str, tmp_path: Path) -> Any:
    """The ConfigMap's text, loaded with capabilities as the Secret would give them, and with what
    the sidecar's container is given.
    """
    text = manifests[f"ConfigMap/{JOBS[job]}"]["data"]["sidecar.toml"]
    for name in ("execute", "internal"):
        (tmp_path / f"{name}.capability").write_text(name * 6)
    path = tmp_path / "sidecar.toml"
    path.write_text(text.replace("/secrets/", f"{tmp_path}/"))
    sidecar = manifests[f"Job/{job}"]["spec"]["template"]["spec"]["initContainers"][0]
    uid = "0f8fad5b-d9cb-469f-a165-70867728950e"
    own = environ(sidecar, NODE_INDEX="3", NATS_PASSWORD="p1", **{RUN_ID: uid})
    return load(path, environ={k: v for k, v in own.items() if k.startswith("SMARTSEARCH_")})


RUN_ID = "SMARTSEARCH_SIDECAR__CLUSTER__RUN_ID"


def gate(pod: dict[str, Any], tmp_path: Path) -> subprocess.Popen[str]:
    """The gate's own words, started on a run directory here; what it asked adds to ``asked``."""
    container = pod["initContainers"][1]
    assert container["name"] == "gate"
    assert "restartPolicy" not in container
    programs = tmp_path / "bin"
    programs.mkdir(exist_ok=True)
    sidecar = programs / "smartsearch-sidecar"
    sidecar.write_text(
        f'#!/bin/sh\n{shlex.quote(sys.executable)} -m smartsearch_sidecar "$@"\ncode=$?\n'
        f'echo "$1 $code" >> {shlex.quote(str(tmp_path / "asked"))}\nexit "$code"\n'
    )
    sidecar.chmod(0o755)
    (words,) = container["args"]
    assert words.count("/runs/001") == 1
    return subprocess.Popen(
        [*container["command"], words.replace("/runs/001", str(tmp_path / "run"))],
        env={**environment(), "PATH": f"{programs}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.process
@pytest.mark.parametrize("job", ["smartsearch-training"], indirect=True)
def test_the_gate(pod: dict[str, Any], tmp_path: Path) -> None:
    """No trainer begins before the sidecar serves; then at once. A latched run is told with its
    cause, and the job fails: its pod is never tried again.
    """
    waiting = gate(pod, tmp_path)
    asked = tmp_path / "asked"
    wait_until(asked.exists, seconds=30)
    with running(tmp_path) as daemon:
        out, err = waiting.communicate(timeout=30)
        assert (waiting.returncode, err) == (0, "")
        assert out.startswith("healthy: ")
        *before, last = asked.read_text().splitlines()
        assert (set(before), last) == ({"check 2"}, "check 0")
        assert daemon.internal().call("POST", "/latch", {"reason": "a test"}).status == 200
        ended = gate(pod, tmp_path)
        out, err = ended.communicate(timeout=30)
    assert (ended.returncode, out) == (1, "")
    assert err.startswith("failed: operator: a test")
    assert pod["restartPolicy"] == "Never"


def test_both_jobs_end_where_the_gate_does(manifests: dict[str, Any]) -> None:
    """They have the same gate, and neither makes another pod of one that failed."""
    specs = [manifests[f"Job/{job}"]["spec"] for job in JOBS]
    gates = [spec["template"]["spec"]["initContainers"][1] for spec in specs]
    assert gates[0] == gates[1]
    assert [spec["backoffLimit"] for spec in specs] == [0, 0]


@pytest.mark.parametrize("job", ["smartsearch-nodes"], indirect=True)
def test_pods_of_a_job_are_nodes_of_one_run(
    manifests: dict[str, Any], job: str, tmp_path: Path
) -> None:
    """Each pod has its index for a name and the job's id for its run, and knows how many there are;
    the servers it asks are those that the other manifest starts.
    """
    spec = manifests[f"Job/{job}"]["spec"]
    config = configured(manifests, job, tmp_path)
    assert spec["completionMode"] == "Indexed"
    assert config.run.nodes == spec["completions"] == spec["parallelism"]
    assert (config.cluster.node, len(config.cluster.run_id)) == ("node-3", 36)
    replicas = manifests["StatefulSet/smartsearch-nats"]["spec"]["replicas"]
    servers = config.cluster.nats_url.get_secret_value().split(",")
    assert servers == [
        f"nats://sidecar:p1@smartsearch-nats-{number}.smartsearch-nats:4222"
        for number in range(replicas)
    ]
    template = spec["template"]
    assert template["spec"]["subdomain"] in {
        name.partition("/")[2] for name in manifests if name.startswith("Service/")
    }
    (sidecars, servers_alone) = manifests["NetworkPolicy/smartsearch-nats"]["spec"]["ingress"]
    assert sidecars["from"][0]["podSelector"]["matchLabels"] == template["metadata"]["labels"]
    assert [rule["ports"][0]["port"] for rule in (sidecars, servers_alone)] == [4222, 6222]


@pytest.mark.process
def test_the_servers_agree(manifests: dict[str, Any], tmp_path: Path) -> None:
    """Three real servers with the manifest's configuration and variables find each other, are
    healthy as the probes ask, hold a key three times, and refuse a client without the password.
    """
    spec = manifests["StatefulSet/smartsearch-nats"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    version = subprocess.run(
        [nats_server(), "--version"], capture_output=True, text=True, check=True
    )
    assert container["image"] == f"nats:{version.stdout.split('v')[-1].strip()}-alpine"
    assert manifests["PodDisruptionBudget/smartsearch-nats"]["spec"]["maxUnavailable"] == 1
    text = manifests["ConfigMap/smartsearch-nats"]["data"]["nats.conf"]
    ports = {
        number: dict(zip(("4222", "6222", "8222"), free_ports(3), strict=True))
        for number in range(3)
    }
    started = []
    try:
        for number in range(spec["replicas"]):
            own = environ(
                container, POD_NAME=f"nats-{number}", SIDECAR_PASSWORD="p12", ROUTE_PASSWORD="p3e4"
            )
            for other in range(3):
                here = f"@127.0.0.1:{ports[other]['6222']}"
                there = f"@smartsearch-nats-{other}.smartsearch-nats:6222"
                assert own[f"ROUTE_{other}"].endswith(there)
                own[f"ROUTE_{other}"] = own[f"ROUTE_{other}"].replace(there, here)
            words = text.replace("/data", f"{tmp_path}/{number}").replace(
                "/run/nats/", f"{tmp_path}/{number}-"
            )
            for given, taken in ports[number].items():
                words = words.replace(f"port: {given}", f"port: {taken}")
            path = tmp_path / f"{number}.conf"
            path.write_text(words)
            with (tmp_path / f"{number}.log").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        [nats_server(), "--config", str(path)],
                        env={**os.environ, **own},
                        stderr=log,
                    )
                )
        probes = {container[name]["httpGet"]["path"] for name in container if "Probe" in name}
        for number in range(3):
            for probe in probes:
                wait_until_ok(
                    f"http://127.0.0.1:{ports[number]['8222']}{probe}", tmp_path / f"{number}.log"
                )
        at = f"127.0.0.1:{ports[0]['4222']}"
        assert asyncio.run(kept(f"nats://sidecar:p12@{at}")) == 3
        assert "Authorization" in said_to_strangers(ports[0]["4222"])
    finally:
        for server in started:
            server.kill()
            server.wait()


def said_to_strangers(port: int) -> str:
    """The last line a server sends to a client without the password."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
        stranger.sendall(b'CONNECT {"verbose": false}\r\nPING\r\n')
        with stranger.makefile("r") as lines:
            return list(lines)[-1]


async def kept(url: str, replicas: int = 3) -> int:
    """How many servers hold a key that was put there."""

    async def ignored(_: Exception) -> None:
        """An error of a server is raised by the call that meets it."""

    client = await nats.connect(url, allow_reconnect=False, connect_timeout=5, error_cb=ignored)
    try:
        stream = client.jetstream()
        bucket = await stream.create_key_value(bucket="a-test", replicas=replicas)
        await bucket.put("key", b"value")
        cluster = (await stream.stream_info("KV_a-test")).cluster
        assert cluster is not None
        return 1 + len(cluster.replicas or ())
    finally:
        await client.close()


def wait_until_ok(url: str, log: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def answers() -> bool:
        try:
            with opener.open(url, timeout=5) as answer:
                return bool(json.load(answer)["status"] == "ok")
        except OSError:
            return False

    wait_until(answers, seconds=30, pause=0.05, found=log.read_text)


def test_every_mount_has_its_volume(
    manifests: dict[str, Any], pod: dict[str, Any], job: str, tmp_path: Path
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
    config = configured(manifests, job, tmp_path)
    places = {
        Path(mount["mountPath"]): mount.get("readOnly", False)
        for mount in pod["initContainers"][0]["volumeMounts"]
    }
    assert places[config.run.directory.parent] is False
    assert places[config.retrieval.bm25.index.parent] is True


def test_rollout_code_is_kept_from_the_answers(pod: dict[str, Any]) -> None:
    """The trainer is another user, mounts neither runs nor capabilities, and gets no proxies."""
    (sidecar, gatekeeper), (trainer,) = pod["initContainers"], pod["containers"]
    users = {one["securityContext"]["runAsUser"] for one in (sidecar, gatekeeper)}
    assert trainer["securityContext"]["runAsUser"] not in users
    assert len(users) == 1
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


@pytest.mark.process
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
    # Nothing but a person knows whether the trainer stood still: the word comes for one start.
    assert "--trainer-stopped" not in command
    assert shlex.split(command)[-1] == f"${service['PassEnvironment'][0]}"
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

# Each word of a script is a Python that starts, several nodes of them at once.
JOB_SECONDS = 120

SRUN = """\
#!/usr/bin/env bash
# srun over the nodes of a job, each an address of this machine: its options, then the command on
# each node, @NODE@ in its words being the node's name; signals handed on, the worst code given.
nodes=$SLURM_JOB_NODELIST
while [[ $1 == --* ]]; do
    if [[ $1 == --nodelist=* ]]; then nodes=${1#*=}; fi
    shift
done
pids=()
trap 'kill -TERM "${pids[@]}"' TERM
for node in ${nodes//,/ }; do
    SLURMD_NODENAME=$node NATS_LISTEN=$node SMARTSEARCH_SIDECAR__SERVER__HOST=$node \\
        "${@//@NODE@/$node}" &
    pids+=($!)
done
worst=0
for pid in "${pids[@]}"; do
    # A wait that a signal cut short says nothing of the process.
    while :; do
        wait "$pid" && code=0 || code=$?
        kill -0 "$pid" 2>/dev/null || break
    done
    if ((code > worst)); then worst=$code; fi
done
exit "$worst"
"""
SCONTROL = """\
#!/bin/sh
# scontrol show hostnames LIST: a line each.
echo "$3" | tr ',' '\\n'
"""


def slurm(
    tmp_path: Path,
    *trainer: str,
    script: Path = SLURM,
    nodes: int = 1,
    given: dict[str, str] | None = None,
    **keys: Any,
) -> subprocess.CompletedProcess[str]:
    """The script as the first node of a job runs it, with real sidecars."""
    programs = tmp_path / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "srun").write_text(SRUN)
    (programs / "scontrol").write_text(SCONTROL)
    (programs / "sidecar").write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m smartsearch_sidecar "$@"\n'
    )
    for path in programs.iterdir():
        path.chmod(0o755)
    config = tmp_path / "sidecar.toml"
    values = {"server.port": 0, "retrieval.provider": "tests.fakes.plugin:instant"}
    config.write_text(toml({**values, **{k.replace("__", "."): v for k, v in keys.items()}}))
    job = subprocess.Popen(
        [str(script), *trainer],
        env={
            **environment(),
            "PATH": f"{programs}:{os.environ['PATH']}",
            "SIDECAR": "sidecar",
            "SIDECAR_CONFIG": str(config),
            "RUNS": str(tmp_path / "runs"),
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_JOB_NODELIST": ",".join(f"127.0.0.{number + 1}" for number in range(nodes)),
            "READY_SECONDS": "60",
            **(given or {}),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = job.communicate(timeout=100)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.communicate()
    return subprocess.CompletedProcess(job.args, job.returncode, out, err)


@pytest.mark.process
@pytest.mark.parametrize("script", [SLURM, SLURM_NATS], ids=lambda path: path.name)
def test_the_script_is_clean(script: Path) -> None:
    """It can be executed and parsed, and shellcheck has nothing to say, hints included."""
    assert os.access(script, os.X_OK)
    lint("bash", "-n", script)
    lint(tool("shellcheck"), script)


def nats_ports() -> dict[str, str]:
    """What ``nats.sh`` is told of ports, all of them free."""
    names = ("NATS_PORT", "NATS_ROUTE_PORT", "NATS_MONITOR_PORT")
    return dict(zip(names, map(str, free_ports(3)), strict=True))


def check_ended(runs: Path, servers: int, port: str) -> None:
    """The servers of the job have ended; what they kept is only their user's to read."""
    kept_files = sorted((runs / "17.nats").glob("*.conf"))
    assert len(kept_files) == servers
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept_files} == {0o600}
    for number in range(servers):
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((f"127.0.0.{number + 1}", int(port)), timeout=5)


@pytest.mark.process
def test_nats_serves_what_runs_inside(tmp_path: Path) -> None:
    """Three servers where there are nodes for them, healthy before what is inside begins, which
    reaches them by the address it is given, and they end with it; its exit code is the job's. For
    one server where there are fewer nodes see ``test_the_nodes_of_a_job_are_one_run``.
    """
    inside = f"""
from __future__ import annotations
import asyncio, nats, os, sys
{inspect.getsource(kept)}
(*_, url) = servers = os.environ["SMARTSEARCH_SIDECAR__CLUSTER__NATS_URL"].split(",")
assert len(servers) == 3, servers
assert asyncio.run(kept(url)) == 3
assert not [name for name in os.environ if name.startswith("NATS_") and "PASS" in name]
sys.exit(7)
"""
    ports = nats_ports()
    ended = slurm(
        tmp_path,
        *(sys.executable, "-c", inside),
        script=SLURM_NATS,
        nodes=4,
        given={"NATS_SERVER": nats_server(), **ports},
    )
    assert ended.returncode == 7, ended.stderr
    check_ended(tmp_path / "runs", 3, ports["NATS_PORT"])


@pytest.mark.process
def test_nats_that_cannot_begin_ends_the_job(tmp_path: Path) -> None:
    """The program inside is never started without it."""
    ended = slurm(
        tmp_path,
        *("touch", str(tmp_path / "trained")),
        script=SLURM_NATS,
        given={"NATS_SERVER": "false"},
    )
    assert ended.returncode == 1
    assert "NATS did not become healthy on 127.0.0.1" in ended.stderr
    assert not (tmp_path / "trained").exists()


@pytest.mark.process
@pytest.mark.timeout(JOB_SECONDS)
def test_a_job_is_served_and_ends_in_order(tmp_path: Path) -> None:
    """The trainer reaches the sidecar, the gate passes, run.closed is recorded, and the job ends
    with the trainer's own code.
    """
    ended = slurm(tmp_path, "bash", "-c", "sidecar check && exit 7")
    assert ended.returncode == 7, ended.stderr
    assert ended.stdout.count("healthy: 0 of 0 searches answered") == 2
    kinds = [record["kind"] for record in read_records(tmp_path / "runs" / "17")]
    assert kinds == ["run.claimed", "run.closed"]


@pytest.mark.process
@pytest.mark.timeout(JOB_SECONDS)
def test_the_nodes_of_a_job_are_one_run(tmp_path: Path) -> None:
    """Sidecars of two nodes, with one NATS server among them, are told who they are, all speak for
    the one run, a failure of one fails it on each, and so the job, whose trainer noticed nothing.
    """
    (port,) = free_ports(1)
    ports = nats_ports()
    runs = tmp_path / "@NODE@"
    trainer = """
if env | grep -q '^NATS_[A-Z_]*PASS'; then exit 8; fi
srun sidecar check --run-dir "$RUNS/17" --settle 20 || exit 9
sidecar latch --reason "a test" --run-dir "${RUNS/@NODE@/127.0.0.2}/17"
"""
    ended = slurm(
        tmp_path,
        *(str(SLURM), "bash", "-c", trainer),
        script=SLURM_NATS,
        nodes=2,
        given={"NATS_SERVER": nats_server(), "RUNS": str(runs), **ports},
        server__port=port,
        server__execute_capability="e" * 43,
        server__internal_capability="i" * 43,
    )
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.count("healthy: ") == 2, ended.stdout
    assert ended.stdout.count("failed: operator: ") == 2, ended.stdout
    assert "keep no checkpoint" in ended.stderr
    check_ended(runs, 1, ports["NATS_PORT"])
    for number in (1, 2):
        run = tmp_path / f"127.0.0.{number}" / "17"
        cluster = json.loads((run / "claim.json").read_bytes())["config"]["cluster"]
        assert (cluster["run_id"], cluster["node"]) == ("slurm-17", f"127-0-0-{number}")
        kinds = [record["kind"] for record in read_records(run)]
        assert kinds == ["run.claimed", "latch.closed", "run.closed"]


@pytest.mark.process
@pytest.mark.timeout(JOB_SECONDS)
def test_a_sidecar_that_cannot_begin_ends_the_job(tmp_path: Path) -> None:
    """The trainer is never started without one."""
    ended = slurm(tmp_path, "touch", str(tmp_path / "trained"), retrieval__provider="no.such:thing")
    assert ended.returncode == 1
    assert "did not become ready" in ended.stderr
    assert not (tmp_path / "trained").exists()


# --- the image -----------------------------------------------------------------------------------


@pytest.mark.process
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


@pytest.mark.process
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
