"""Where a run is reached: the bound socket, and the two URLs that ``endpoints.json`` holds."""

from __future__ import annotations

import errno
import os
import resource
import socket
from dataclasses import asdict

import orjson
import structlog

from smartsearch_sidecar import errors
from smartsearch_sidecar.client import Endpoints

OTHER_DESCRIPTORS = 256
"""Beside client connections: journal, index, helper, retriever and the event loop."""


def served_at(host: str, port: int, execute: str, internal: str) -> Endpoints:
    """The two URLs of a run, with the capabilities ``execute`` and ``internal``."""
    base = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    return Endpoints(f"{base}/{execute}", f"{base}/{internal}")


def endpoints_json(endpoints: Endpoints) -> bytes:
    """The bytes of ``endpoints.json``: both URLs, and the id of this process."""
    value = {**asdict(endpoints), "pid": os.getpid()}
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket that does not listen yet.

    Args:
        host: an address; one with a colon is IPv6.
        port: 0 takes any free one.

    Raises:
        errors.UsageError: the port is taken, or the address is not one of this host.
    """
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
    """Raises the soft limit of descriptors to what ``connections_max`` connections need.

    Logs a warning where the hard limit is lower: without a descriptor a connection cannot be
    accepted, and its call gets no answer.
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
