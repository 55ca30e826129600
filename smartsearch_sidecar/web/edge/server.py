"""The two ends of serving: a socket that accepts once aiohttp was checked, and the drain.

Apart from the daemon, its one user, so that aiohttp's insides stay in this folder.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final

from smartsearch_sidecar.web.edge import connection
from smartsearch_sidecar.web.edge.connection import EdgeServer
from smartsearch_sidecar.web.edge.runtime import check_runtime

BACKLOG: Final = 4096  # connections; at 1024 half of 2,000 newcomers wait a second for a SYN retry
DRAIN_LOOK_SECONDS: Final = 0.05  # how often a drain looks for connections that became idle

_CHECKED: Final[set[type]] = set()
"""Kinds of loop that aiohttp was checked on; a process has two listeners and one aiohttp."""


async def listen(server: EdgeServer, sock: socket.socket) -> asyncio.Server:
    """Accept connections on the bound TCP socket; accepted ones inherit its stall bound.

    Raises:
        NotAvailable: aiohttp or the system lacks what the edge leans on.
    """
    loop = asyncio.get_running_loop()
    if type(loop) not in _CHECKED:
        await check_runtime()
        _CHECKED.add(type(loop))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(server.stall_seconds * 1000))
    return await loop.create_server(server, sock=sock, backlog=BACKLOG)


def descriptor_left() -> bool:
    """Whether a socket can be made now. Without a descriptor the event loop closes a connection
    that it cannot accept, and tells no code of it.
    """
    try:
        socket.socket().close()
    except OSError:
        return False
    return True


async def drain(server: EdgeServer, seconds: float) -> int:
    """End every connection: idle ones now, busy ones after their answer, all after ``seconds``.

    The listener must be closed before. Answers say ``Connection: close`` from here on; streams end
    where they are. Returns how many connections still had work, which was then cancelled.
    """
    server.draining = True
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    leaving: set[asyncio.Task[None]] = set()
    while True:
        for edge in server.edges():
            if edge.streaming:
                edge.force_close()
            elif edge.idle():
                edge.close()
                leaving.add(loop.create_task(edge.leave()))
        left = deadline - loop.time()
        if left <= 0 or await server.settled(min(left, DRAIN_LOOK_SECONDS)):
            break
    cut = set(server.tasks)
    for edge in server.edges():
        edge.cut()
    for task in cut | leaving:
        task.cancel()
    if cut or leaving:
        await asyncio.wait(cut | leaving, timeout=connection.HALF_CLOSE_SECONDS)
    return len(cut)
