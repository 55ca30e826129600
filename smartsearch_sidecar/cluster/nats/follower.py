"""Follows a JetStream stream in its order: no message left out or delivered twice, over reconnects.

A stream numbers its messages without gaps, and its leader sends each on to all subscribers as soon
as it is kept (``republish``). So there are two ways to a message and one rule. A message that
arrives with the next number is delivered; where a number is missing, after silence, and over every
new connection, the stream is asked for what follows the last message delivered.

A consumer of JetStream's could do this too, and is not used: to make one again after a server's
death takes a leader of the whole cluster, which may come ten seconds later than the stream's own;
in these ten seconds a latch would reach no other node. In the bucket of keys each key keeps only
its last value, so after a fault the present values are delivered, in the order of their changes.

Apart from ``bus.py``, its one importer, which follows two streams with it: how no message is missed
is a theory of its own, and is read alone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.nats.connection import Message, NatsConnection
from smartsearch_sidecar.cluster.nats.dialer import Dialer
from smartsearch_sidecar.cluster.nats.streams import REQUEST_SECONDS, Stream, last_message

SILENCE_SECONDS: Final = 1.0
"""Silence after which the stream is asked whether it has more: a lost message is so late."""

AGAIN_SECONDS: Final = 0.1
BATCH_MESSAGES: Final = 500
BATCH_BYTES: Final = 4 << 20
WAITING_MAX: Final = 10_000
"""Messages that wait here while older ones are read; those beyond it are dropped here, and read
from the stream like the older ones."""

OnStored = Callable[[int, str, bytes], None]
"""Receives a message of a stream: its number, its subject below the stream's, its bytes."""


class Follower:
    """Delivers the messages of one stream; ``last`` is the number of the last one delivered."""

    def __init__(self, dialer: Dialer, stream: Stream, on_stored: OnStored) -> None:
        self.last = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._dialer = dialer
        self._stream = stream
        self._on_stored = on_stored

    async def run(self) -> None:
        """Follows until cancelled."""
        try:
            while True:
                connection = await self._dialer.reach()
                # A node that may have missed the others' latch is not connected. A new connection
                # alone does not change that: first it reads what it missed.
                connection.at_end(self._missing)
                # Where this lasts, the dialer reports it; here it only means: try again.
                with suppress(errors.ClusterUnreachable):
                    await self._follow(connection)
                self._missing()
                await asyncio.sleep(AGAIN_SECONDS)
        finally:
            self._dialer.clear(self)

    async def reaches(self, number: int) -> None:
        """Returns once the message of this number, or a later one, was delivered."""
        if self.last < number:
            reached = asyncio.get_running_loop().create_future()
            self._waiting.append((number, reached))
            await reached

    async def _follow(self, connection: NatsConnection) -> None:
        """Over one connection, until it ends."""
        arrived: asyncio.Queue[Message | None] = asyncio.Queue(WAITING_MAX)

        async def on_message(message: Message | None) -> None:
            if not arrived.full():
                arrived.put_nowait(message)

        connection.at_end(lambda: None if arrived.full() else arrived.put_nowait(None))
        subscription = await connection.subscribe(self._stream.sent_on_subjects, on_message)
        catching: asyncio.Task[None] | None = None
        try:
            await connection.settle()
            missed = True
            while not connection.ended.is_set():
                # At the same time as messages arrive: a leader that cannot be asked now may be
                # there, and send messages on, a moment later.
                if catching is not None and catching.done():
                    catching.result()
                    catching = None
                if missed and catching is None:
                    catching = asyncio.create_task(self._catch_up(connection))
                    missed = False
                try:
                    async with asyncio.timeout(SILENCE_SECONDS):
                        message = await arrived.get()
                except TimeoutError:
                    missed = True
                    continue
                number = int((message.headers or {}).get("Nats-Sequence", 0)) if message else 0
                if message is not None and number == self.last + 1:
                    self._deliver(number, message.subject, message.data)
                elif number > self.last:
                    missed = True
        finally:
            if catching is not None:
                catching.cancel()
                await asyncio.gather(catching, return_exceptions=True)
            await connection.unsubscribe(subscription)

    async def _catch_up(self, connection: NatsConnection) -> None:
        """Delivers all that the stream's leader has by now."""
        while not connection.ended.is_set():
            try:
                held = await last_message(connection, self._stream.name, self._stream.subjects)
                present = held["seq"] if held else 0
                while self.last < present:
                    # Read from any replica; one that lags behind is asked again.
                    await self._batch(connection)
                self._dialer.clear(self)
                return
            except errors.ClusterUnreachable:
                self._missing()
                await asyncio.sleep(AGAIN_SECONDS)

    async def _batch(self, connection: NatsConnection) -> None:
        """Delivers some of what follows the last message delivered, or pauses where none came."""
        arrived: asyncio.Queue[Message] = asyncio.Queue()
        inbox = connection.new_inbox()
        subscription = await connection.subscribe(inbox, arrived.put)
        asked = {
            "seq": self.last + 1,
            "next_by_subj": self._stream.subjects,
            "batch": BATCH_MESSAGES,
            "max_bytes": BATCH_BYTES,
        }
        before = self.last
        try:
            await connection.publish(
                f"$JS.API.DIRECT.GET.{self._stream.name}", json.dumps(asked).encode(), reply=inbox
            )
            while True:
                async with asyncio.timeout(REQUEST_SECONDS):
                    message = await arrived.get()
                headers = message.headers or {}
                if "Status" in headers:
                    break
                number = int(headers.get("Nats-Sequence", 0))
                if number > self.last:
                    self._deliver(number, headers.get("Nats-Subject", ""), message.data)
        except TimeoutError:
            raise errors.CLUSTER_UNREACHABLE("JetStream does not answer") from None
        finally:
            await connection.unsubscribe(subscription)
        if self.last == before:
            await asyncio.sleep(AGAIN_SECONDS)

    def _missing(self) -> None:
        self._dialer.note(self, self._dialer.patience)

    def _deliver(self, number: int, subject: str, data: bytes) -> None:
        self.last = number
        self._on_stored(number, self._stream.below(subject), data)
        for waiting in tuple(self._waiting):
            if waiting[0] <= number:
                self._waiting.remove(waiting)
                if not waiting[1].done():
                    waiting[1].set_result(None)
