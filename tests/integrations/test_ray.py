"""``integrations/ray_sidecars.py`` against a real Ray cluster of two nodes, and real sidecars.

Ray lives in a process of its own, a driver that is told what to do line by line: its threads and
warnings are not this process's, and what it prints can be searched for capabilities. The far node
has a network of its own, where the machine allows it, so that one port can be every node's; without
one the nodes share a loopback. A node costs three seconds of CPU, a sidecar with its actor two: no
more of them are started than the facts need.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from smartsearch_sidecar.client import Client
from smartsearch_sidecar.integrations import ray_sidecars
from smartsearch_sidecar.ledger.verify import verify
from smartsearch_sidecar.retrieval.bm25.build import build
from tests.fakes.nats_cluster import free_ports, nats_cluster
from tests.fakes.process import ROOT, environment, toml
from tests.fakes.ray_driver import FAR, HOME, NODES, inside
from tests.fakes.served import (
    ENVIRONMENT,
    EXECUTE_CAPABILITY,
    INTERNAL_CAPABILITY,
    read_records,
)
from tests.fakes.until import wait_until

CORPUS = ROOT / "tests" / "data" / "corpora" / "flashrag.jsonl"
LOST_SECONDS = 40.0  # Ray tells of a lost node after some
# A cluster of many processes, on a machine with other work to do.
pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
if sys.version_info >= (3, 14):
    pytestmark.append(pytest.mark.may_skip("there is no Ray for this Python yet"))


class Refused(Exception):
    """What the driver raised, in words."""


class Network(NamedTuple):
    """The far node's: a namespace's name, with addresses at home and there; empty where there is
    none.
    """

    name: str = ""
    home: str = "127.0.0.1"
    far: str = ""


class Ray:
    """The driver's process."""

    def __init__(self, folder: Path, network: Network) -> None:
        self.folder = folder
        self.network = network
        self.log = folder / "driver.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.fakes.ray_driver"),
                    *(str(folder), network.name, network.far),
                ],
                env={
                    **environment(),
                    "RAY_TMPDIR": str(folder),
                    "RAY_USAGE_STATS_ENABLED": "0",
                    # No worker before there is work for one.
                    "RAY_prestart_worker_first_driver": "0",
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def __call__(self, do: str, **words: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **words}) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        answer = json.loads(line)
        if "error" in answer:
            raise Refused(answer["error"])
        return answer["result"]

    def searched(self, tag: str, url: str) -> int:
        """Asks as a rollout on that node does; the status."""
        with inside(self.network.name if tag == FAR else ""):
            return Client(url).execute("Aristotle", ENVIRONMENT).status

    def latch(self, tag: str, folder: Path) -> None:
        """Fails the run of that node, as an operator does."""
        with inside(self.network.name if tag == FAR else ""):
            client = Client(endpoints(folder)["internal_url"])
            assert client.call("POST", "/latch", {"reason": "a test"}).status == 200

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self.process.stdout.close()


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """A network namespace with a cable to this one, where the machine allows it."""
    number = os.getpid()
    name = f"ray{number % 100_000}"
    near, far = f"{name}n", f"{name}f"
    at = Network(name, f"10.231.{number % 256}.1", f"10.231.{number % 256}.2")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def let_go() -> None:
        with suppress(OSError):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
            # A namespace goes with the last process in it; its cable need not wait for that.
            subprocess.run(["ip", "link", "delete", near], check=False, capture_output=True)

    try:
        ip("netns", "add", name)
        ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        ip("address", "add", f"{at.home}/24", "dev", near)
        ip("link", "set", near, "up")
        ip("-n", name, "address", "add", f"{at.far}/24", "dev", far)
        ip("-n", name, "link", "set", far, "up")
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "route", "add", "default", "via", at.home)
    except (OSError, subprocess.CalledProcessError):
        at = Network()
    yield at
    let_go()


@pytest.fixture(scope="module")
def ray(network: Network) -> Iterator[Ray]:
    pytest.importorskip("ray", reason="ray is missing: run `make setup`")
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # a short path: it holds sockets
    driver = Ray(folder, network)
    try:
        assert driver.answer() == "ready"
        yield driver
    finally:
        driver.end()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray") / "index"
    build(CORPUS, folder)
    return folder


@pytest.fixture
def config(tmp_path: Path, index: Path) -> Path:
    """One configuration for all nodes, its capabilities in files beside it."""
    for name, capability in (("execute", EXECUTE_CAPABILITY), ("internal", INTERNAL_CAPABILITY)):
        (tmp_path / f"{name}.capability").write_text(capability)
    path = tmp_path / "sidecar.toml"
    values = {
        "run.nodes": len(NODES),
        "server.port": 0,
        "server.execute_capability_file": "execute.capability",
        "server.internal_capability_file": "internal.capability",
        "retrieval.bm25.index": str(index),
    }
    path.write_text(toml(values))
    return path


def endpoints(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "endpoints.json").read_bytes())
    return value


def kinds(folder: Path) -> list[str]:
    return [record["kind"] for record in read_records(folder)]


def test_a_node_is_found_again_by_its_host() -> None:
    """A node's name is its host's, as the configuration takes it; several on one host differ."""

    def named(*hosts: str) -> list[str]:
        nodes = [
            {"NodeID": f"{number}" * 56, "NodeManagerHostname": host, "Alive": True}
            for number, host in enumerate(hosts)
        ]
        return list(ray_sidecars._named(nodes, lambda node: True))

    assert named("gpu-7.cluster.local", "gpu-8") == ["gpu-7-cluster-local", "gpu-8"]
    assert named("vm", "vm", "other") == ["vm-00000000", "vm-11111111", "other"]
    assert len(named("x" * 200, "x" * 200)[0]) == 64


def test_the_file_needs_no_ray_to_be_read() -> None:
    """Ray is imported where it is used: a driver may look at the file before it has one."""
    told = "import sys, smartsearch_sidecar.integrations.ray_sidecars; print('ray' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", told],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "False\n"


def test_a_keeper_tells_a_failure_in_words(tmp_path: Path) -> None:
    """Endpoints that are missing or open to others, and a port where nothing listens, are rows of
    the keeper's answers: it raises nothing that Ray would log, and names no capability.
    """
    keeper = ray_sidecars.SidecarKeeper([], str(tmp_path), {})
    assert "cannot be read" in keeper.digest("salt")["trouble"]
    path = tmp_path / "endpoints.json"
    path.write_text(
        json.dumps(
            {
                "sandbox_url": f"http://127.0.0.1:1/{EXECUTE_CAPABILITY}",
                "internal_url": f"http://127.0.0.1:1/{INTERNAL_CAPABILITY}",
            }
        )
    )
    path.chmod(0o640)
    assert "chmod it to 600" in keeper.sandbox_url()["trouble"]
    path.chmod(0o600)
    assert keeper.sandbox_url() == {"sandbox_url": f"http://127.0.0.1:1/{EXECUTE_CAPABILITY}"}
    keeper._process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        row = keeper.health(0.0)
    finally:
        keeper._process.communicate(b"\n")
    detail = "the sidecar gave no answer (ConnectionRefusedError)"
    assert row == {"state": "unreachable", "detail": detail}


def test_a_run_over_every_node(ray: Ray, config: Path, tmp_path: Path) -> None:
    """Each node has its own sidecar, one call tells of all, and one failure fails the whole. Ray
    restarts nothing that was killed. Every ledger is brought home as it is; resumed by hand, the
    run has what was killed in its latch, and what was stopped goes on until one ends it.
    """
    words = {"config": str(config), "runs": str(tmp_path / "{node}"), "run": "all"}
    shown = ray("start", **words)
    names = shown[2:]
    assert len(names) == len(NODES)
    assert shown[0] == f"<sidecars on {', '.join(names)}>"
    alive = [actor for actor in ray("actors") if actor["State"] == "ALIVE"]
    assert len({actor["Address"]["NodeID"] for actor in alive}) == len(NODES)
    assert all(actor["Name"] == "" and int(actor["NumRestarts"]) == 0 for actor in alive)

    good, killed = (named(ray, names, tag) for tag in (FAR, HOME))
    folders = {name: tmp_path / name / "all" for name in names}
    for tag, name, number in ((FAR, good, 1), (HOME, killed, 2)):
        url = endpoints(folders[name])["sandbox_url"]
        assert [ray.searched(tag, url) for _ in range(number)] == [200] * number
    healthy, rows, _ = ray("check", run="all")
    assert healthy
    assert {name: row["responses"] for name, row in rows.items()} == {good: 1, killed: 2}

    with pytest.raises(Refused, match="one sandbox_url serves every node, but theirs differ"):
        ray("url", run="all")

    os.kill(endpoints(folders[killed])["pid"], signal.SIGKILL)
    healthy, rows, _ = ray("check", run="all")
    assert not healthy
    assert (rows[killed]["state"], rows[killed]["exit_code"]) == ("ended", 137)
    assert rows[good]["state"] == "healthy"

    with pytest.raises(Refused, match="stop them first"):
        ray("collect", run="all", into=str(tmp_path / "home"))
    assert ray("stop", run="all") == {good: 0, killed: 137}
    assert (folders[killed] / "endpoints.json").exists()
    brought(ray, folders, tmp_path / "home", unended=killed)
    files = [path for path in (tmp_path / "home" / killed).rglob("*") if path.is_file()]
    assert sorted(path.name for path in files) == ["000001.jsonl", "claim.json", "latch.room"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    with pytest.raises(Refused, match="File exists"):
        ray("collect", run="all", into=str(tmp_path / "home"))

    ray("start", **words, resume=True, trainer_stopped=True)
    healthy, rows, said = ray("check", run="all")
    assert not healthy
    assert (rows[killed]["state"], rows[killed]["cause"]) == ("failed", "unclean_restart")
    assert f"{killed}: failed: unclean_restart: " in said
    assert rows[good]["state"] == "healthy"
    ray.latch(FAR, folders[good])
    healthy, rows, said = ray("check", run="all")
    assert [row["state"] for row in rows.values()] == ["failed", "failed"]
    assert f"{good}: failed: operator: a test" in said
    assert ray("stop", run="all") == {good: 4, killed: 4}
    brought(ray, folders, tmp_path / "again")


def brought(ray: Ray, folders: dict[str, Path], home: Path, unended: str = "") -> None:
    """Collects the stopped run: every copy is a whole ledger, and has its end but for one."""
    assert ray("collect", run="all", into=str(home)) == {name: str(home / name) for name in folders}
    for name, folder in folders.items():
        assert kinds(home / name) == kinds(folder)
        assert verify(home / name).ok
        assert (kinds(folder)[-1] == "run.closed") == (name != unended)


def named(ray: Ray, names: Sequence[str], tag: str) -> str:
    """Which of the names is the node's with the tag."""
    number = ray("node_id", tag=tag)
    (name,) = (name for name in names if number.startswith(name.rpartition("-")[2]))
    return name


def test_one_that_cannot_begin_ends_all(ray: Ray, config: Path, tmp_path: Path) -> None:
    """Two nodes that share a folder cannot share a run: its last line is told, none stays up."""
    words = {
        "config": str(config),
        "runs": str(tmp_path / "runs"),
        "run": "both",
    }
    with pytest.raises(Refused, match=r"RuntimeError: a sidecar could not begin: .*runs/both"):
        ray("start", **words)
    assert not (tmp_path / "runs" / "both" / "endpoints.json").exists()


@pytest.mark.may_skip("network namespaces need root and iproute2")
def test_nodes_of_one_run(ray: Ray, config: Path, tmp_path: Path) -> None:
    """With NATS each is told its name and the run's, each speaks for all, and one failure is every
    node's; what the servers are asked with is in nothing that Ray keeps. Where each node has a
    loopback of its own, one port and one address are every node's: a rollout that is given it
    reaches the sidecar beside it.
    """
    apart = bool(ray.network.name)
    (port,) = free_ports(1) if apart else (0,)
    with nats_cluster(
        tmp_path / "nats", credentials="sidecar:pass-word-of-nats", host=ray.network.home
    ) as servers:
        text = config.read_text().replace("server.port = 0", f"server.port = {port}")
        config.write_text(text + toml({"cluster.nats_url": servers.url}))
        words = {"config": str(config), "runs": str(tmp_path / "{node}"), "run": "run-7"}
        names = ray("start", **words, one_port=apart, coordinated=True)[2:]
        healthy, rows, said = ray("check", run="run-7")
        assert healthy, said
        folders = [tmp_path / name / "run-7" for name in names]
        for name, folder in zip(names, folders, strict=True):
            cluster = json.loads((folder / "claim.json").read_bytes())["config"]["cluster"]
            assert (cluster["node"], cluster["run_id"]) == (name, "run-7")
        if apart:
            url = ray("url", run="run-7")
            assert url == f"http://127.0.0.1:{port}/{EXECUTE_CAPABILITY}"
            assert [ray.searched(tag, url) for tag in NODES] == [200, 200]
            healthy, rows, said = ray("check", run="run-7")
            assert healthy, said
            assert [row["responses"] for row in rows.values()] == [1, 1]
        ray.latch(HOME, tmp_path / named(ray, names, HOME) / "run-7")
        healthy, rows, _ = ray("check", run="run-7")
        assert [(row["state"], row["cause"]) for row in rows.values()] == [
            ("failed", "operator")
        ] * 2
        assert ray("stop", run="run-7") == dict.fromkeys(names, 4)
    assert b"pass-word-of-nats" not in b"".join(kept(ray).values())
    if not apart:
        pytest.skip("all but the one address: this machine does not allow network namespaces")


def test_a_node_that_is_lost(ray: Ray, config: Path, tmp_path: Path) -> None:
    """One node's address is the run's; a node that is lost takes its sidecar with it in order, and
    is not healthy.
    """
    words = {"config": str(config), "runs": str(tmp_path / "{node}"), "run": "few"}
    (name,) = ray("start", **words, tags=[FAR], one_port=True)[2:]
    folder = tmp_path / name / "few"
    assert ray("url", run="few") == endpoints(folder)["sandbox_url"]
    ray("remove", tag=FAR)
    wait_until(lambda: not (folder / "endpoints.json").exists(), seconds=LOST_SECONDS)
    assert kinds(folder)[-1] == "run.closed"
    wait_until(
        lambda: ray("check", run="few")[1][name]["state"] == "unreachable", seconds=LOST_SECONDS
    )
    assert not ray("check", run="few")[0]


def kept(ray: Ray) -> dict[str, bytes]:
    """What Ray and the driver have written, by file."""
    return {str(path): path.read_bytes() for path in ray.folder.rglob("*") if path.is_file()}


def test_nothing_ray_keeps_holds_a_capability(ray: Ray) -> None:
    """Neither its logs, nor its tables, nor what the driver printed, after all of the above."""
    tables = json.dumps(ray("actors"))
    texts = kept(ray)
    assert any("raylet" in path for path in texts)
    for capability in (EXECUTE_CAPABILITY, INTERNAL_CAPABILITY):
        assert capability not in tables
        assert [path for path, text in texts.items() if capability.encode() in text] == []
