"""What the kernel gives a run: its bound sockets, and descriptors enough for its connections."""

from __future__ import annotations

import errno
import resource
import socket

import structlog

from smartsearch_sidecar import errors

OTHER_DESCRIPTORS = 256
"""Beside client connections: journal, index, helper, retriever and the event loop."""


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket that does not listen yet; port 0 takes any free one.

    Raises ``UsageError`` where the port is taken, or the address is not one of this host.
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
        why = exc.strerror or exc
        raise errors.USAGE(
            f"cannot listen on {host} port {port}: {why}; set server.host and server.port"
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
