"""One sidecar on every node of a running Ray cluster: start, check, stop, collect.

One file for the driver's own Python (3.10, standard library; Ray is imported once it is used)::

    import ray, ray_sidecars

    ray.init(address="auto")
    with ray_sidecars.start("/shared/smartsearch/sidecar.toml", "/local/runs", "017") as sidecars:
        train(sandbox_url=sidecars.sandbox_url())
        if not sidecars.check(settle=30).healthy:
            raise SystemExit("keep no checkpoint after the last accepted one")
    sidecars.collect("/shared/ledgers/017")

Each sidecar is a process of its own, held by an actor that cannot leave its node. Ray never
restarts it: rollouts met the outage, so the operator must say that a run goes on (``resume=True``)
and, where provenance is not enforced, that no trainer was at work since its sidecars were stopped
(``trainer_stopped=True``): this file does not know what asked them.
When the driver, the actor or the node's Ray ends, the sidecar drains and records its end.

The configuration is a path, read on every node, as are the capabilities it names. They never pass
through Ray, with one exception: ``sandbox_url()`` brings that address back to the driver inside an
answer. It is in no log, name, argument or exception. Every other call compares digests.
"""

from __future__ import annotations

import hashlib
import http.client
import importlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

READY_SECONDS = 3600.0
"""A large index is verified in full before it is served."""
STOP_SECONDS = 60.0
"""The deadline of a search, what is under way, and the closing of the ledger."""
ACTOR_SECONDS = 120.0
"""For Ray to start a worker on a busy node, and for any call that only looks."""
POLL_SECONDS = 2.0
CHUNK_BYTES = 4 * 1024 * 1024
NOT_COLLECTED = frozenset({"endpoints.json", "lock"})
NODE_VARIABLE = "SMARTSEARCH_SIDECAR__CLUSTER__NODE"
RUN_ID_VARIABLE = "SMARTSEARCH_SIDECAR__CLUSTER__RUN_ID"

Rows = dict[str, dict[str, Any]]  # by the node's name
Where = Callable[[dict[str, Any]], bool]  # of a row of `ray.nodes()`

# An actor that ends takes its children with it by SIGKILL, and the run would have no end. So its
# child is this holder: the sidecar is told by SIGTERM when the holder goes (prctl 1 is
# PR_SET_PDEATHSIG), the holder when the actor does, and in each of these the sidecar drains.
_HOLDER = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None)
libc.prctl(1, signal.SIGTERM)
child = os.fork()
if child == 0:
    libc.prctl(1, signal.SIGTERM)
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as exc:
        sys.exit(f"{sys.argv[1]}: {exc.strerror}")
signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
sys.exit(code if code >= 0 else 128 - code)
"""

_ACTOR = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0}
"""It uses none of the trainer's CPUs or GPUs, and Ray never restarts it."""

# --- shared: requests (of smartsearch_reward.py, copied by `make integrations`) -------------------

ENDPOINTS_VARIABLE = "SMARTSEARCH_SIDECAR_ENDPOINTS"
ANSWER_BYTES_MAX = 4 * 1024 * 1024


class _Trouble(Exception):
    """A failure as a sentence. It stays in this file: Ray drops the text of a class it lacks."""

    latch = True


def _url(name: str, endpoints: str | None = None) -> str:
    """The URL called ``name``, read at every call: a sidecar that is resumed has another port."""
    path = endpoints or os.environ.get(ENDPOINTS_VARIABLE)
    if not path:
        raise _Trouble(f"{ENDPOINTS_VARIABLE} must name the run's endpoints.json where Ray starts")
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(65536)
    except OSError as exc:
        raise _Trouble(f"{path} cannot be read ({exc.strerror}): is the sidecar up?") from None
    if mode & 0o077:
        raise _Trouble(f"{path} can be read by others: it holds capabilities, so chmod it to 600")
    try:
        url = str(json.loads(raw)[name]).rstrip("/")
        parts = urlsplit(url)
        if parts.scheme != "http" or not (parts.hostname and parts.port and parts.path.strip("/")):
            raise ValueError
    except (ValueError, LookupError, TypeError, RecursionError):
        raise _Trouble(f"{path} is not the endpoints.json of a sidecar") from None
    return url


def _ask(
    url: str, path: str, value: Any, seconds: float, bytes_max: int = ANSWER_BYTES_MAX
) -> tuple[int, Any]:
    """Status and JSON of one POST, or GET without ``value``: no proxy, no redirect, no retry."""
    parts = urlsplit(url)
    try:
        body = None if value is None else json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):
        raise _Trouble("the request cannot be written as UTF-8 JSON") from None
    method, headers = ("POST", {"Content-Type": "application/json"}) if body else ("GET", {})
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=seconds)
    try:
        connection.request(method, parts.path + path, body, headers)
        answer = connection.getresponse()
        raw = answer.read(bytes_max + 1)
    except (OSError, http.client.HTTPException) as exc:
        raise _Trouble(f"the sidecar gave no answer ({type(exc).__name__})") from None
    finally:
        connection.close()
    if len(raw) > bytes_max:
        raise _Trouble(f"got an answer of more than {bytes_max} bytes: is another program there?")
    try:
        # A sidecar never quotes its capability, but a proxy's error page may.
        return answer.status, json.loads(raw.replace(parts.path.strip("/").encode(), b"***"))
    except (ValueError, RecursionError):
        raise _Trouble("got an answer that is not JSON: is another program on this port?") from None


# --- end of shared --------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """The answers of all nodes: a row for each, with ``state`` and, after a failure, ``cause``."""

    healthy: bool
    nodes: Rows

    def __str__(self) -> str:
        keys = ("state", "cause", "detail", "trouble", "exit_code")
        rows = ((name, *map(row.get, keys)) for name, row in self.nodes.items())
        return "\n".join(": ".join(str(word) for word in row if word) for row in rows)


class SidecarKeeper:
    """The actor of one node: a sidecar's process and files. It returns a failure as a row with
    ``trouble``, a sentence, since an exception's text and frames would go into Ray's logs.
    """

    def __init__(self, command: list[str], directory: str, environment: dict[str, str]) -> None:
        self._command = command
        self._directory = directory
        self._environment = environment
        self._log = directory + ".log"
        self._endpoints = os.path.join(directory, "endpoints.json")
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> dict[str, Any]:
        try:
            os.makedirs(os.path.dirname(self._directory), mode=0o700, exist_ok=True)
            descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "wb") as log:
                self._process = subprocess.Popen(  # noqa: S603 - the operator's own command
                    [sys.executable, "-I", "-S", "-c", _HOLDER, *self._command],
                    env={**os.environ, **self._environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as exc:
            return {"trouble": f"{exc.filename or self._directory}: {exc.strerror}"}
        return {}

    def ready(self, seconds: float) -> dict[str, Any]:
        """Whether it serves within ``seconds``; ``trouble`` if it has ended instead."""
        until = time.monotonic() + seconds
        while True:
            if self._process is None or self._process.poll() is not None:
                return {"trouble": f"it ended: {self._last_words()}"}
            if self._serves(self._process.pid):
                return {"ready": True}
            if time.monotonic() > until:
                return {"ready": False}
            time.sleep(0.05)

    def health(self, settle: float) -> dict[str, Any]:
        """The run's health: the keys that a verdict needs, without those about the process."""
        if ended := self._ended():
            return ended
        try:
            url = _url("internal_url", self._endpoints)
            status, value = _ask(url, f"/health?settle={settle:g}", None, settle + 10.0)
            cause = value.get("cause") or {}
            return {
                "state": value["state"] if status in (200, 503) else f"status {status}",
                "status": status,
                "attempts": value.get("retrieval_attempts"),
                "responses": value.get("retrieval_responses"),
                "cause": cause.get("cause"),
                "detail": cause.get("detail"),
            }
        except _Trouble as exc:
            detail = str(exc)
        except (LookupError, TypeError, AttributeError):
            detail = "got an answer without a state: is another program on this port?"
        return self._ended(1.0) or {"state": "unreachable", "detail": detail}

    def digest(self, salt: str) -> dict[str, Any]:
        """A salted digest of the address: it tells equal addresses from others, nothing else."""
        row = self.sandbox_url()
        if "trouble" in row:
            return row
        return {"digest": hashlib.sha256(f"{salt} {row['sandbox_url']}".encode()).hexdigest()}

    def sandbox_url(self) -> dict[str, Any]:
        """The address itself, for the one caller that needs it."""
        try:
            return {"sandbox_url": _url("sandbox_url", self._endpoints)}
        except _Trouble as exc:
            return {"trouble": str(exc)}

    def stop(self, seconds: float) -> dict[str, Any]:
        """Tells it to drain, waits up to ``seconds``, then kills it."""
        if self._process is None:
            return {"exit_code": None}
        self._process.terminate()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        return {"exit_code": self._process.returncode}

    def files(self) -> dict[str, Any]:
        """Every file of the run directory: relative path, bytes, sha256."""
        found = []
        for folder, _, names in os.walk(self._directory):
            for path in (os.path.join(folder, name) for name in names):
                below = os.path.relpath(path, self._directory)
                if below not in NOT_COLLECTED:
                    found.append((below, os.path.getsize(path), _sha256(path)))
        return {"files": sorted(found)} if found else {"trouble": "it has no run directory"}

    def read(self, below: str, offset: int) -> dict[str, Any]:
        with open(os.path.join(self._directory, below), "rb") as file:
            file.seek(offset)
            return {"bytes": file.read(CHUNK_BYTES)}

    def _ended(self, seconds: float = 0.0) -> dict[str, Any] | None:
        """The row of a process that has ended, or ends within ``seconds``; None while it lives."""
        if self._process is None:
            return {"state": "ended", "exit_code": None}
        try:
            return {"state": "ended", "exit_code": self._process.wait(seconds)}
        except subprocess.TimeoutExpired:
            return None

    def _serves(self, session: int) -> bool:
        """Whether endpoints.json is of this process or of its child. A killed sidecar leaves its
        file behind, and in a shared folder the file may be of another node.
        """
        try:
            with open(self._endpoints, "rb") as file:
                return os.getsid(int(json.load(file)["pid"])) == session
        except (OSError, ValueError, LookupError):
            return False

    def _last_words(self) -> str:
        try:
            with open(self._log, "rb") as file:
                said = file.read()[-4096:].decode("utf-8", "replace").strip()
        except OSError:
            said = ""
        return said.split("\n")[-1].strip()[:500] or f"nothing is in {self._log}"


class Sidecars:
    """The sidecars of a run, one for each node, by the node's name."""

    def __init__(self, keepers: dict[str, Any], served: set[str], where: Where) -> None:
        self._keepers = keepers
        self._served = served
        self._where = where
        self.exit_codes: dict[str, int | None] = {}

    def __repr__(self) -> str:
        return f"<sidecars on {', '.join(self._keepers)}>"

    def __enter__(self) -> Sidecars:  # noqa: PYI034 - Python 3.10 has no `Self`
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def begin(self, seconds: float, *, one_address: bool = True) -> None:
        """Starts every process and returns once all serve, as ``start`` describes it."""
        until = time.monotonic() + seconds
        self._good("a sidecar could not be started", "begin")
        waiting = list(self._keepers)
        while waiting:
            failed = "a sidecar could not begin"
            rows = self._good(failed, "ready", POLL_SECONDS, names=waiting)
            waiting = [name for name, row in rows.items() if not row["ready"]]
            if waiting and time.monotonic() > until:
                raise RuntimeError(f"not ready after {seconds:g} s: {', '.join(waiting)}")
        if one_address:
            self.require_one_address()

    def sandbox_url(self) -> str:
        """The one address for the rollouts of every node. It holds a capability."""
        self.require_one_address()
        name = next(iter(self._keepers))
        rows = self._good("the address could not be read", "sandbox_url", names=[name])
        return str(rows[name]["sandbox_url"])

    def require_one_address(self) -> None:
        """Raises ``RuntimeError`` if the nodes' addresses differ."""
        salt = secrets.token_hex(16)
        rows = self._good("an address could not be compared", "digest", salt)
        if len({row["digest"] for row in rows.values()}) != 1:
            raise RuntimeError(
                "one sandbox_url serves every node, but theirs differ: set server.port and "
                "server.execute_capability_file in the configuration, the same on every node"
            )

    def check(self, settle: float = 30.0) -> Verdict:
        """Asks every node at once, each waiting up to ``settle`` seconds for work in flight. A node
        that joined the cluster after ``start`` has no sidecar and is not healthy.
        """
        rows = self._all("health", settle, seconds=settle + ACTOR_SECONDS)
        for row in rows.values():
            row.setdefault("state", "unreachable")
        nodes = importlib.import_module("ray").nodes()
        for name, node in _named(nodes, self._where).items():
            if node["NodeID"] not in self._served:
                rows[name] = {"state": "without a sidecar"}
        return Verdict(all(row["state"] == "healthy" for row in rows.values()), rows)

    def stop(self, seconds: float = STOP_SECONDS) -> dict[str, int | None]:
        """Drains and ends every sidecar. Returns exit codes: 0 fine, 4 the run has failed, 137 the
        process was killed, None if the node is lost. A second call changes nothing.
        """
        if not self.exit_codes:
            rows = self._all("stop", seconds, seconds=seconds + ACTOR_SECONDS)
            self.exit_codes = {name: row.get("exit_code") for name, row in rows.items()}
        return self.exit_codes

    def collect(self, into: str | os.PathLike[str]) -> dict[str, str]:
        """Copies every node's run directory to ``into/<name>``, which must not exist. Returns those
        folders by the node's name. Raises ``RuntimeError`` before ``stop``, and if a ledger cannot
        be read or a copy differs from its original; the other nodes' ledgers are copied before.
        """
        if not self.exit_codes:
            raise RuntimeError("a ledger is complete once its sidecar has ended: stop them first")
        folders: dict[str, str] = {}
        missing: dict[str, str] = {}
        for name, row in self._all("files", seconds=READY_SECONDS).items():
            folder = os.path.join(os.fspath(into), name)
            try:
                if "trouble" in row:
                    raise RuntimeError(row["trouble"])
                os.makedirs(folder, mode=0o700)
                for below, size, digest in row["files"]:
                    self._copy(name, below, os.path.join(folder, below), size, digest)
                folders[name] = folder
            except (OSError, RuntimeError) as exc:
                missing[name] = str(exc.strerror if isinstance(exc, OSError) else exc)
        if missing:
            raise RuntimeError(f"not every ledger could be collected: {_listed(missing)}")
        return folders

    def _copy(self, name: str, below: str, path: str, size: int, digest: str) -> None:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            for offset in range(0, size, CHUNK_BYTES):
                failed = "a ledger could not be read"
                rows = self._good(failed, "read", below, offset, names=[name])
                file.write(rows[name]["bytes"])
        if _sha256(path) != digest:
            raise RuntimeError(f"the copy of {below} differs from its original")

    def _all(self, method: str, *words: Any, seconds: float, names: Sequence[str] = ()) -> Rows:
        """One call to every keeper at once. A keeper that is too late gives ``trouble``."""
        ray = importlib.import_module("ray")
        asked = names or self._keepers
        refs = {name: getattr(self._keepers[name], method).remote(*words) for name in asked}
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=seconds)
        return {name: _answer(ray, ref) for name, ref in refs.items()}

    def _good(self, failed: str, method: str, *words: Any, names: Sequence[str] = ()) -> Rows:
        """The same for calls that need every answer. Raises ``RuntimeError`` for a ``trouble``."""
        rows = self._all(method, *words, seconds=ACTOR_SECONDS, names=names)
        troubles = {name: row["trouble"] for name, row in rows.items() if "trouble" in row}
        if troubles:
            raise RuntimeError(f"{failed}: {_listed(troubles)}")
        return rows


def start(
    config: str | os.PathLike[str],
    runs: str | os.PathLike[str],
    run: str,
    *,
    coordinated: bool = False,
    resume: bool = False,
    trainer_stopped: bool = False,
    program: Sequence[str] = ("smartsearch-sidecar",),
    where: Where = lambda node: True,
    port: Callable[[dict[str, Any]], int] | None = None,
    ready_seconds: float = READY_SECONDS,
) -> Sidecars:
    """Starts a sidecar on every node and returns once all serve. If one does not, it stops them
    all and raises ``RuntimeError`` with the last line of each that ended, or with the names of
    those that are not ready in time.

    ``config`` and ``runs`` are paths on every node; the run directory is ``runs/run``, where
    ``{node}`` in ``runs`` stands for the node's name (needed if nodes share the folder), and its
    log is ``runs/run.log``. ``coordinated`` says that the configuration has ``[cluster]``: each
    node then gets its name, and the run's id is ``run``. ``resume`` goes on with a run, and
    ``trainer_stopped`` says that its trainer stood still since. ``where`` chooses nodes by their
    row of ``ray.nodes()``. ``port`` is for a rehearsal of several nodes on one machine.
    """
    ray = importlib.import_module("ray")
    nodes = _named(ray.nodes(), where)
    if not nodes:
        raise RuntimeError("no node of the Ray cluster was chosen")
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    here = sys.modules.get(__name__)
    if here is not None:  # the workers need not have this file
        ray.cloudpickle.register_pickle_by_value(here)
    try:
        keepers = {}
        for name, node in nodes.items():
            directory = os.path.join(os.fspath(runs).replace("{node}", name), run)
            command = [*program, "serve", "--config", os.fspath(config), "--run-dir", directory]
            command += ["--resume"] if resume else []
            command += ["--trainer-stopped"] if trainer_stopped else []
            command += [] if port is None else ["--port", str(port(node))]
            own = {NODE_VARIABLE: name, RUN_ID_VARIABLE: run} if coordinated else {}
            there = strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            actor = ray.remote(SidecarKeeper).options(scheduling_strategy=there, **_ACTOR)
            keepers[name] = actor.remote(command, directory, own)
    finally:
        if here is not None:
            ray.cloudpickle.unregister_pickle_by_value(here)
    sidecars = Sidecars(keepers, {node["NodeID"] for node in nodes.values()}, where)
    try:
        sidecars.begin(ready_seconds, one_address=port is None)
    except BaseException:
        sidecars.stop()
        raise
    return sidecars


def _answer(ray: Any, ref: Any) -> Any:
    try:
        return ray.get(ref, timeout=0.001)
    except ray.exceptions.RayError as exc:  # its text may hold a capability
        return {"trouble": f"its keeper gave no answer ({type(exc).__name__})"}


def _named(nodes: Iterable[dict[str, Any]], where: Where) -> Rows:
    """Nodes by their host's name, in the characters of ``cluster.node``: the same on a resume."""
    alive = (node for node in nodes if node["Alive"] and where(node))
    found = sorted(alive, key=lambda node: str(node["NodeID"]))
    hosts = [re.sub(r"[^A-Za-z0-9_-]", "-", node["NodeManagerHostname"])[:55] for node in found]
    several = Counter(hosts)
    return {
        host if several[host] == 1 else f"{host}-{node['NodeID'][:8]}": node
        for host, node in zip(hosts, found, strict=True)
    }


def _listed(sentences: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {sentence}" for name, sentence in sentences.items())


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
