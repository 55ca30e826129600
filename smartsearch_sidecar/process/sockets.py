"""What the kernel gives a run: its bound sockets, and descriptors enough for its connections."""

from __future__ import annotations

import errno
import resource
import socket
import sys

import structlog

from smartsearch_sidecar import errors
from smartsearch_sidecar.web.edge.connection import STRANGERS_MAX

OTHER_DESCRIPTORS = 256 + 2 * STRANGERS_MAX
"""Beside connections that have shown a capability: journal, index, helper, retriever, the event
loop, and the strangers of both listeners."""
CONNECTIONS_MIN = 64
"""A run with room for fewer is not begun: one node's rollouts would be refused."""
LAST_DESCRIPTORS = 16
"""From here to the limit: a connection that is given one of them is among the last."""


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


def last_descriptors() -> int:
    """The first of the last descriptors, under the limit of now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft - LAST_DESCRIPTORS


def take_descriptors(connections_max: int) -> int:
    """Raises the soft limit of descriptors to what ``connections_max`` connections need.

    Returns how many connections may show a capability: fewer where the hard limit is lower.

    Raises:
        UsageError: the hard limit has no room for a node's rollouts.
    """
    wanted = connections_max + OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = soft
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit == resource.RLIM_INFINITY:
        return connections_max
    allowed = min(connections_max, limit - OTHER_DESCRIPTORS)
    if allowed < min(connections_max, CONNECTIONS_MIN):
        raise errors.USAGE(
            f"ulimit -n allows {limit} file descriptors, and a run needs "
            f"{CONNECTIONS_MIN + OTHER_DESCRIPTORS} at least and {wanted} for "
            "server.connections_max: raise the hard limit"
        )
    if allowed < connections_max:
        structlog.get_logger("daemon").warning(
            "server.connections_max follows ulimit -n: raise it for more",
            connections_max=allowed,
            wanted=connections_max,
        )
    return allowed
