"""Where a run is reached: the bound socket, and the two URLs that ``endpoints.json`` holds."""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass

import orjson

from smartsearch_sidecar import errors


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
            raise errors.UsageError(
                f"port {port} on {host} is taken: stop what listens there, or set server.port"
            ) from None
        raise errors.UsageError(
            f"cannot listen on {host} port {port}: {exc.strerror or exc}; set server.host and "
            "server.port"
        ) from None
    return sock
