"""Follows a JetStream stream in its order: nothing left out, nothing told twice, over reconnects.

A stream numbers its messages without gaps, and its leader sends each on to whoever listens as soon
as it is kept (``republish``). So there are two ways to a message and one rule. What arrives next in
number is told; where a number is missing, after silence, and over every new session, the stream is
asked for what follows the last message told.

No consumer of JetStream's does this, though it could: to make one again after a server's death
takes a leader of the whole cluster, which may be ten seconds later than the stream's own, ten
seconds in which nodes write a latch that nobody hears. In the bucket of keys each key keeps its
last value only, so what is told of it after a fault is the present, in the order of its changes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.nats.connection import Message, Session
from smartsearch_sidecar.cluster.nats.dialer import Link
from smartsearch_sidecar.cluster.nats.streams import REQUEST_SECONDS, Stream, last_message

SILENCE_SECONDS: Final = 1.0
"""Silence after which the stream is asked whether it has more: what a lost message may cost."""

AGAIN_SECONDS: Final = 0.1
BATCH_MESSAGES: Final = 500
BATCH_BYTES: Final = 4 << 20
WAITING_MAX: Final = 10_000
"""Messages that wait here while older ones are read; those beyond it are read like them."""

Told = Callable[[int, str, bytes], None]
"""Told of a message: its number, its subject below the stream's, its bytes."""


class Following:
    """Tells of the messages of one stream. ``last`` is the number of the last that was told."""

    def __init__(self, link: Link, stream: Stream, told: Told) -> None:
        self.last = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._link = link
        self._stream = stream
        self._told = told

    async def run(self) -> None:
        """Follows until cancelled."""
        try:
            while True:
                session = await self._link.reach()
                # A node that hears nothing of the others' latch is not connected, also not where it
                # is linked again: first it hears what it missed.
                session.at_end(self._missing)
                # Named by the link where it lasts; here it only means: once more.
                with suppress(errors.ClusterUnreachable):
                    await self._follow(session)
                self._missing()
                await asyncio.sleep(AGAIN_SECONDS)
        finally:
            self._link.clear(self)

    async def reaches(self, number: int) -> None:
        """Returns once the message of this number, or a later one, has been told."""
        if self.last < number:
            reached = asyncio.get_running_loop().create_future()
            self._waiting.append((number, reached))
            await reached

    async def _follow(self, session: Session) -> None:
        """Over one session, until it ends."""
        arrived: asyncio.Queue[Message | None] = asyncio.Queue(WAITING_MAX)

        async def hear(message: Message | None) -> None:
            if not arrived.full():
                arrived.put_nowait(message)

        session.at_end(lambda: None if arrived.full() else arrived.put_nowait(None))
        subscription = await session.subscribe(self._stream.told_subjects, hear)
        catching: asyncio.Task[None] | None = None
        try:
            await session.settle()
            missed = True
            while not session.ended.is_set():
                # Beside what arrives: where there is no leader to be asked, there may be one that
                # sends on, a moment later.
                if catching is not None and catching.done():
                    catching.result()
                    catching = None
                if missed and catching is None:
                    catching = asyncio.create_task(self._catch_up(session))
                    missed = False
                try:
                    async with asyncio.timeout(SILENCE_SECONDS):
                        message = await arrived.get()
                except TimeoutError:
                    missed = True
                    continue
                number = int((message.headers or {}).get("Nats-Sequence", 0)) if message else 0
                if message is not None and number == self.last + 1:
                    self._tell(number, message.subject, message.data)
                elif number > self.last:
                    missed = True
        finally:
            if catching is not None:
                catching.cancel()
                await asyncio.gather(catching, return_exceptions=True)
            await session.unsubscribe(subscription)

    async def _catch_up(self, session: Session) -> None:
        """Tells all that the stream's leader has by now."""
        while not session.ended.is_set():
            try:
                held = await last_message(session, self._stream.name, self._stream.subjects)
                present = held["seq"] if held else 0
                while self.last < present:
                    # Read from any replica; one that lags behind is asked again.
                    await self._batch(session)
                self._link.clear(self)
                return
            except errors.ClusterUnreachable:
                self._missing()
                await asyncio.sleep(AGAIN_SECONDS)

    async def _batch(self, session: Session) -> None:
        """Tells some of what follows the last message told, or nothing after a pause."""
        arrived: asyncio.Queue[Message] = asyncio.Queue()
        inbox = session.new_inbox()
        subscription = await session.subscribe(inbox, arrived.put)
        asked = {
            "seq": self.last + 1,
            "next_by_subj": self._stream.subjects,
            "batch": BATCH_MESSAGES,
            "max_bytes": BATCH_BYTES,
        }
        before = self.last
        try:
            await session.publish(
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
                    self._tell(number, headers.get("Nats-Subject", ""), message.data)
        except TimeoutError:
            raise errors.CLUSTER_UNREACHABLE("JetStream does not answer") from None
        finally:
            await session.unsubscribe(subscription)
        if self.last == before:
            await asyncio.sleep(AGAIN_SECONDS)

    def _missing(self) -> None:
        self._link.note(self, self._link.patience)

    def _tell(self, number: int, subject: str, data: bytes) -> None:
        self.last = number
        self._told(number, self._stream.below(subject), data)
        for waiting in tuple(self._waiting):
            if waiting[0] <= number:
                self._waiting.remove(waiting)
                if not waiting[1].done():
                    waiting[1].set_result(None)
