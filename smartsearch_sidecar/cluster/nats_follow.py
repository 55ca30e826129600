"""Follows a JetStream stream in its order: nothing left out, nothing told twice, over reconnects.

Each following is a consumer that the server forgets by itself. It is made anew, from the message
after the last that was told, whenever anything is odd: a session that ended, a number left out,
more silence than the server's own heartbeat allows. So there is one way through, taken at the
start and after every fault. In the bucket of keys each key keeps its last value only, hence what
is told of it after a fault is the present, in the order of its changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from smartsearch_sidecar.cluster.nats_link import Link
from smartsearch_sidecar.cluster.nats_session import Message, Session
from smartsearch_sidecar.cluster.nats_streams import NANOSECONDS, api, last_message
from smartsearch_sidecar.errors import ClusterUnreachable

HEARTBEAT_SECONDS: Final = 1.0
SILENCE_SECONDS: Final = 2.5
AGAIN_SECONDS: Final = 0.1
FORGOTTEN_SECONDS: Final = 5.0

Told = Callable[[int, str, bytes], None]


class Following:
    """Tells of the messages of one stream's subjects; ``caught`` is set once up to date."""

    def __init__(self, link: Link, stream: str, subjects: Sequence[str], told: Told) -> None:
        self.caught = asyncio.Event()
        self._link = link
        self._stream = stream
        self._subjects = subjects
        self._told = told
        self._last = 0

    async def run(self) -> None:
        """Follows until cancelled."""
        try:
            while True:
                session = await self._link.reach()
                # Named by the link where it lasts; here it only means: once more.
                with suppress(ClusterUnreachable, TimeoutError):
                    await self._follow(session)
                # A node that hears nothing of the others' latch is not connected.
                self._link.note(self, self._link.patience)
                await asyncio.sleep(AGAIN_SECONDS)
        finally:
            self._link.clear(self)

    async def _follow(self, session: Session) -> None:
        """One consumer, until something is odd."""
        inbox = session.new_inbox()
        arrived: asyncio.Queue[Message] = asyncio.Queue()
        subscription = await session.subscribe(inbox, arrived.put)
        try:
            await self._consumer(session, inbox)
            # Present, as the leader has it: the replica that serves us may lag behind.
            present = 0
            for subject in self._subjects:
                held = await last_message(session, self._stream, subject)
                present = max(present, held["seq"] if held else 0)
            self._weigh(present)
            delivered = 0
            while not session.ended.is_set():
                async with asyncio.timeout(SILENCE_SECONDS):
                    message = await arrived.get()
                headers = message.headers or {}
                if headers.get("Status") == "100":
                    # All that was sent before is told: more may come.
                    if more := message.reply or headers.get("Nats-Consumer-Stalled", ""):
                        await session.publish(more, b"")
                    if headers.get("Nats-Last-Consumer", str(delivered)) != str(delivered):
                        return
                    continue
                delivered += 1
                numbers = message.metadata.sequence
                if numbers.consumer != delivered:
                    return
                if numbers.stream > self._last:
                    self._last = numbers.stream
                    self._told(numbers.stream, message.subject, message.data)
                    self._weigh(present)
        finally:
            await session.unsubscribe(subscription)

    async def _consumer(self, session: Session, inbox: str) -> None:
        start = (
            {"deliver_policy": "by_start_sequence", "opt_start_seq": self._last + 1}
            if self._last
            else {"deliver_policy": "all"}
        )
        config = {
            **start,
            "deliver_subject": inbox,
            "filter_subjects": list(self._subjects),
            "ack_policy": "none",
            "max_deliver": 1,
            "flow_control": True,
            "idle_heartbeat": int(HEARTBEAT_SECONDS * NANOSECONDS),
            "inactive_threshold": int(FORGOTTEN_SECONDS * NANOSECONDS),
            # Where it was is known here; it need not be replicated to be made again.
            "num_replicas": 1,
            "mem_storage": True,
        }
        await api(
            session,
            f"$JS.API.CONSUMER.CREATE.{self._stream}",
            {"stream_name": self._stream, "config": config},
        )

    def _weigh(self, present: int) -> None:
        if self._last >= present:
            self.caught.set()
            self._link.clear(self)
