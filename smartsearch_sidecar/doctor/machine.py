"""What a finding is, and this host: ports, proxies, user, run directory, filesystem, descriptors.

Blocking and quick; a port is bound and closed again. No check here needs a retriever or a scorer.
"""

from __future__ import annotations

import enum
import ipaddress
import os
import re
import resource
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from smartsearch_sidecar import errors
from smartsearch_sidecar.config import Config
from smartsearch_sidecar.load_test.client_worker import CLIENT_SECONDS, THREADS_PER_RANK
from smartsearch_sidecar.process.sockets import CONNECTIONS_MIN, OTHER_DESCRIPTORS, bind

SCORE_BYTES = 24 * 1024
"""Records of one score: a rollout of 8,192 tokens kept verbatim, and its answer."""
HELPER_CALL_BYTES = 2 * 1024
"""Records of one helper call: request by digest, answer verbatim."""
GIB = 1024**3

_SYNC_IS_EMPTY = {"tmpfs", "ramfs", "devtmpfs"}
_SYNC_IS_REMOTE = {"nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "beegfs", "gpfs", "9p"}
_OCTAL = re.compile(r"\\([0-7]{3})")


class Level(enum.StrEnum):
    """How good a thing is. Only an error keeps a run from being good."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


class Finding(NamedTuple):
    """``remedy`` is a command, a key or a sentence; ``None`` where nothing is to be done."""

    name: str
    level: Level
    text: str
    remedy: str | None = None


def ok(name: str, text: str) -> Finding:
    """Nothing to do."""
    return Finding(name, Level.OK, text)


def warning(name: str, text: str, remedy: str) -> Finding:
    """A run may begin; ``remedy`` says what would be better."""
    return Finding(name, Level.WARNING, text, remedy)


def error(name: str, text: str, remedy: str | None = None) -> Finding:
    """A run would not begin, or not stay good. Named errors carry their remedy in their text."""
    return Finding(name, Level.ERROR, text, remedy)


# --- ports and clients ----------------------------------------------------------------------------


def check_ports(config: Config) -> Iterator[Finding]:
    server = config.server
    given = [("port", server.host, server.port)]
    if server.probe_port is not None:
        given.append(("probe port", server.probe_host or server.host, server.probe_port))
    for name, host, port in given:
        try:
            bind(host, port).close()
        except errors.UsageError as exc:
            yield error(name, exc.message)
            continue
        if port:
            yield ok(name, f"{port} on {host} is free")
        elif name == "port":
            yield warning(
                name,
                "0: any free port is taken, and sandbox_url changes with each start",
                "set server.port where more than one node, or a restart, must keep the URL",
            )
        else:
            yield ok(name, f"any free one on {host}")


def check_room(config: Config, ranks: int | None) -> Iterator[Finding]:
    """Whether all calls at once find a place, and get an answer before the client leaves."""
    execute = config.execute
    if execute.deadline_seconds >= CLIENT_SECONDS:
        yield warning(
            "deadline",
            f"{execute.deadline_seconds:g} s, and the pinned client leaves after "
            f"{CLIENT_SECONDS:g} s",
            "execute.deadline_seconds = 9: a late search is then named, not lost",
        )
    if ranks is None:
        yield warning("waiting room", "not checked: the ranks are not known", "pass --ranks")
        return
    at_once, places = ranks * THREADS_PER_RANK, execute.slots + execute.waiting_max
    if places < at_once:
        yield error(
            "waiting room",
            f"{ranks} ranks make {at_once} calls at once, slots and waiting room hold {places}: "
            "the next call closes the latch",
            f"execute.waiting_max = {at_once - execute.slots} or more",
        )
    else:
        yield ok("waiting room", f"{places} places for {at_once} calls at once")


def check_descriptors(config: Config, ranks: int | None) -> Finding:
    """Whether the hard limit allows as many connections as will come; ``serve`` raises the soft
    limit itself.
    """
    name = "descriptors"
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return ok(name, "unlimited")
    needed = max((ranks or 0) * THREADS_PER_RANK, CONNECTIONS_MIN) + OTHER_DESCRIPTORS
    wanted = max(needed, config.server.connections_max + OTHER_DESCRIPTORS)
    if hard < needed:
        return error(
            name,
            f"{hard} are allowed, {f'{ranks} ranks need' if ranks else 'a run needs'} {needed}",
            f"ulimit -Hn {wanted}, or LimitNOFILE={wanted} in the unit",
        )
    if hard < wanted:
        return warning(
            name,
            f"{hard} are allowed, server.connections_max needs {wanted} and follows them",
            f"ulimit -Hn {wanted}, or server.connections_max = {hard - OTHER_DESCRIPTORS}",
        )
    return ok(name, f"{hard} are allowed, {wanted} wanted")


def check_user(uid: int, trainer_uid: int | None) -> Finding:
    """Whether code that a rollout runs can read references and the internal URL."""
    name = "user"
    if trainer_uid is not None and trainer_uid != uid:
        rest = ", but root reads every file" if trainer_uid == 0 else ""
        text = f"this is uid {uid}, the trainer's is {trainer_uid}{rest}"
        remedy = "run the trainer as another user than root, or the sidecar in a container"
        return warning(name, text, remedy) if rest else ok(name, text)
    same = "the trainer's" if trainer_uid == uid else "perhaps the trainer's"
    return warning(
        name,
        f"this is uid {uid}, {same}: code that a rollout runs as the same user can read the "
        "references and the internal URL",
        "separate them by another user or a container; --trainer-uid names the trainer's user",
    )


# --- proxies --------------------------------------------------------------------------------------
#
# The pinned client is ``requests``, which obeys proxy variables for loopback as well: the calls go
# to the proxy, and its answers become rollout text. The rules are those of ``requests`` for one
# plain http address; a test holds them to it.


def check_proxies(environ: Mapping[str, str], host: str, port: int) -> Finding:
    """Whether a client with this environment reaches ``http://host:port`` itself."""
    name = "proxy variables"
    captured = capturing(environ, host, port)
    if captured is None:
        return ok(name, f"a client with this environment reaches {host} directly")
    return error(
        name,
        f"{captured} is set and nothing exempts {host}: rollouts would call the proxy instead",
        f"where the trainer is started: {export_line(environ, host)}",
    )


def capturing(environ: Mapping[str, str], host: str, port: int) -> str | None:
    """The variable that sends calls to ``http://host:port`` to a proxy, if one does."""
    if _exempt(environ.get("no_proxy") or environ.get("NO_PROXY") or "", host, port):
        return None
    for wanted in ("http_proxy", "all_proxy"):
        # The lower-case one wins where both are set, even if it is empty.
        name = wanted if wanted in environ else wanted.upper()
        if environ.get(name):
            return name
    return None


def export_line(environ: Mapping[str, str], host: str) -> str:
    """The line to run before the trainer: it keeps present exemptions, and sets both spellings."""
    before = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    names = [name.strip() for name in before.split(",") if name.strip()]
    names += [name for name in dict.fromkeys((host, "127.0.0.1", "localhost")) if name not in names]
    value = ",".join(names)
    return f"export NO_PROXY={value} no_proxy={value}"


def _exempt(no_proxy: str, host: str, port: int) -> bool:
    if no_proxy.strip() == "*":  # in a list of names, an asterisk means nothing
        return True
    names = [name.strip().lstrip(".").lower() for name in no_proxy.split(",") if name.strip()]
    if any(_ends(host.lower(), name) for name in names):
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return any(_ends(f"{host}:{port}", name) for name in names)
    return any(_covers(name, host) for name in names)


def _ends(host: str, name: str) -> bool:
    return host == name or host.endswith(f".{name}")


def _covers(name: str, address: str) -> bool:
    try:
        return "/" in name and ipaddress.ip_address(address) in ipaddress.ip_network(name, False)
    except ValueError:
        return False


# --- the run directory ----------------------------------------------------------------------------


def check_directory(directory: Path | None) -> Finding:
    name = "run directory"
    if directory is None:
        remedy = "pass --run-dir, here and to `serve`"
        return warning(name, "not named in the configuration", remedy)
    if (directory / "latch.json").exists():
        return error(name, f"{directory} is a run whose latch is closed", "name a new directory")
    if (directory / "claim.json").exists():
        remedy = "`serve --resume` goes on, or name a new one"
        return warning(name, f"{directory} is a run already", remedy)
    if os.path.lexists(directory):
        text = f"{directory} exists and is not a run"
        return error(name, text, "name a directory that does not exist")
    parent = existing(directory.parent)  # `serve` creates the missing folders below it
    if not os.access(parent, os.W_OK | os.X_OK):
        text = f"{parent} cannot be written by uid {os.geteuid()}"
        return error(name, text, "give it to this user")
    return ok(name, f"{directory} can be created")


def check_space(config: Config, place: Path, search_bytes: int) -> Finding:
    """Free space against what the quotas allow; ``search_bytes`` are the records of one search."""
    name = "free space"
    need = config.execute.max_calls * search_bytes
    if config.reward.enabled:
        for quotas in (config.reward, config.reward.validation):
            need += quotas.max_scores * SCORE_BYTES + quotas.max_helper_calls * HELPER_CALL_BYTES
    free = shutil.disk_usage(place).free
    written = f"{need / GIB:.1f} GiB ({search_bytes:,} bytes a search)"
    text = f"{free / GIB:.1f} GiB at {place}; all quotas together write {written}"
    if free >= need:
        return ok(name, text)
    remedy = "another disk, or smaller quotas (execute.max_calls): a full disk ends the run"
    # Quotas are upper bounds, rarely used up: with half of that space a run may well end in order.
    return error(name, text, remedy) if free < need / 2 else warning(name, text, remedy)


def check_filesystem(place: Path, mounts: str) -> Finding:
    """Whether a sync at ``place`` (absolute, resolved) reaches a disk, by the text ``mounts`` of
    ``/proc/self/mounts``.
    """
    name, local = "filesystem", "keep runs on a local disk"
    depth, kind, options = 0, "", ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 4:
            continue
        point = Path(_OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[1]))
        # The last of equal ones counts: it was mounted over the others.
        if place.is_relative_to(point) and len(point.parts) >= depth:
            depth, kind, options = len(point.parts), fields[2], fields[3]
    if not depth:
        return warning(name, f"the filesystem of {place} is not known", local)
    if kind in _SYNC_IS_EMPTY or "volatile" in options.split(","):
        lost = "a sync there does not reach a disk, and a power cut loses answers that were given"
        return warning(name, f"{place} is {kind}: {lost}", local)
    if kind in _SYNC_IS_REMOTE or kind.startswith("fuse."):
        return warning(
            name,
            f"{place} is {kind}: every sync crosses a network, and how durable it is depends on "
            "the server",
            f"{local}, and copy them when they are done",
        )
    return ok(name, f"{place} is {kind}")


def existing(path: Path) -> Path:
    """The path, or its nearest parent folder that exists; links followed."""
    found = (folder.resolve() for folder in (path, *path.parents) if folder.is_dir())
    return next(found, Path("/"))
