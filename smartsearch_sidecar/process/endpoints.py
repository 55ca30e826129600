"""Where a run is reached: the bound socket, and the two URLs that ``endpoints.json`` holds."""

from __future__ import annotations

import errno
import os
import resource
import socket
from dataclasses import dataclass

import orjson
import structlog

from smartsearch_sidecar import errors

OTHER_DESCRIPTORS = 256  # journal, index, helper and retriever connections, loop


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a served run is reached. Both URLs hold a capability: never log them."""

    sandbox_url: str
    internal_url: str
    pid: int

    def as_json(self) -> bytes:
        """The bytes of ``endpoints.json``."""
        value = {
            "sandbox_url": self.sandbox_url,
            "internal_url": self.internal_url,
            "pid": self.pid,
        }
        return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def at(cls, host: str, port: int, execute: str, internal: str) -> Endpoints:
        """The endpoints of this process, with the capabilities ``execute`` and ``internal``."""
        base = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        return cls(f"{base}/{execute}", f"{base}/{internal}", os.getpid())


def bind(host: str, port: int) -> socket.socket:
    """A bound, not yet listening TCP socket, or a ``UsageError`` that names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as exc:
        sock.close()
        if exc.errno == errno.EADDRINUSE:
            raise errors.USAGE(
                f"port {port} on {host} is taken: stop what listens there, or set server.port"
            ) from None
        raise errors.USAGE(
            f"cannot listen on {host} port {port}: {exc.strerror or exc}; set server.host and "
            "server.port"
        ) from None
    return sock


def raise_descriptor_limit(connections_max: int) -> None:
    """Asks for as many descriptors as connections may be open, and says so where that is refused:
    a connection nobody can accept is a call nobody answers.
    """
    wanted = connections_max + OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        reached = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, reached), hard))
        if reached < wanted:
            structlog.get_logger("daemon").warning(
                "too few file descriptors for server.connections_max: raise ulimit -n",
                wanted=wanted,
                allowed=reached,
            )
