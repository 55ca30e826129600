"""What a run keeps on NATS, and how it is followed: every message once, in order, over reconnects.

A run has a bucket of keys and a stream of its answers' digests. A stream numbers its messages
without gaps, and its leader sends each on to all subscribers as soon as it is kept (``republish``).
So there are two ways to a message and one rule. A message that arrives with the next number is
delivered; where a number is missing, after silence, and over every new connection, the stream is
asked for what follows the last message delivered.

A consumer of JetStream's could do this too, and is not used: to make one again after a server's
death takes a leader of the whole cluster, which may come ten seconds later than the stream's own;
in these ten seconds a latch would reach no other node. In the bucket of keys each key keeps only
its last value, so after a fault the present values are delivered, in the order of their changes.

Apart from ``bus.py``, its one importer, which does with a stream what nodes need: how no message is
missed is a theory of its own, and is read alone.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.nats.connection import Dialer, Message, NatsConnection

REQUEST_SECONDS: Final = 1.0  # of one try; servers answer in milliseconds if they have a leader
DUPLICATE_SECONDS: Final = 120  # the servers know a write's id so long; no call tries longer
SILENCE_SECONDS: Final = 1.0  # then the stream is asked for more: a lost message is so late
AGAIN_SECONDS: Final = 0.1
BATCH_MESSAGES: Final = 500
BATCH_BYTES: Final = 4 << 20
# Messages that wait while older ones are read; those beyond are read from the stream like these.
WAITING_MAX: Final = 10_000
NANOSECONDS: Final = 1_000_000_000
REPLICAS: Final = 3

# JetStream's numbers of errors that are expected here.
NOT_FOUND: Final = 10037
OTHER_CONFIGURATION: Final = 10058
NOT_CLUSTERED: Final = 10074
NO_PEERS: Final = 10005


async def api(
    connection: NatsConnection,
    subject: str,
    body: bytes | dict[str, Any],
    *,
    headers: dict[str, str] | None = None,
    expected: Sequence[int] = (),
) -> dict[str, Any]:
    """One request of JetStream's; an error other than those expected is ``ClusterUnreachable``."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode("ascii")
    answer = await connection.request(subject, data, seconds=REQUEST_SECONDS, headers=headers)
    error = answer.get("error")
    if error and error.get("err_code") not in expected:
        said = error.get("description", "an error")
        raise errors.CLUSTER_UNREACHABLE(f"JetStream answers: {said}")
    return answer


def decoded(message: dict[str, Any], field: str) -> bytes:
    """A message's ``data`` or ``hdrs``, its headers, as JetStream's JSON has them."""
    return base64.b64decode(message.get(field, ""))


class Stream:
    """One stream, by the names that ``nats kv`` and ``nats stream`` show."""

    def __init__(self, name: str, subjects: str, sent_on: str, **more: Any) -> None:
        """``sent_on`` is where the servers send each message on once it is kept."""
        self.name, self.subjects, self.sent_on = name, subjects, sent_on
        self.config = {
            **more,
            "name": name,
            "subjects": [subjects],
            "republish": {"src": subjects, "dest": sent_on},
            "storage": "file",
            "retention": "limits",
            "discard": "new",
            "duplicate_window": DUPLICATE_SECONDS * NANOSECONDS,
            "deny_delete": True,
            "deny_purge": True,
            # For reading many at once; a single value is always asked of the leader.
            "allow_direct": True,
        }

    def subject(self, key: str) -> str:
        return self.subjects.removesuffix(">") + key

    async def message(self, connection: NatsConnection, subject: str) -> dict[str, Any] | None:
        """The last message of a subject, which may have wildcards; asked of the stream's leader."""
        body = {"last_by_subj": subject}
        name = f"$JS.API.STREAM.MSG.GET.{self.name}"
        return (await api(connection, name, body, expected=(NOT_FOUND,))).get("message")

    async def last(self, connection: NatsConnection) -> int:
        """The number of the last message, 0 before the first."""
        message = await self.message(connection, self.subjects)
        return int(message["seq"]) if message else 0


class Streams:
    def __init__(self, run_id: str) -> None:
        bucket, sent = f"smartsearch-{run_id}", f"smartsearch.{run_id}.sent"
        self.keys = Stream(
            f"KV_{bucket}", f"$KV.{bucket}.>", f"{sent}.keys.>", max_msgs_per_subject=1
        )
        self.answers = Stream(
            f"{bucket}-answers", f"smartsearch.{run_id}.answers", f"{sent}.answers"
        )
        self._made: dict[str, str] = {}

    async def make(self, connection: NatsConnection, servers: int) -> None:
        """Makes both, or finds them as another node has made them. Raises ``ClusterUnreachable``
        where the servers cannot now (they may still be coming up), ``ClusterRefused`` where a
        stream of that name is not one of ours.
        """
        for stream in (self.keys, self.answers):
            self._made[stream.name] = await _make(connection, stream, servers)

    async def prove(self, connection: NatsConnection) -> None:
        """Checks that both are the streams this node began with, and that they can be written.
        Raises ``ClusterUnreachable`` without proof, and only a write proves it: a server without a
        quorum still answers reads. Raises ``ClusterRefused`` where they were made anew, so what the
        nodes had agreed on is gone.
        """
        for name, made in self._made.items():
            info = await api(connection, f"$JS.API.STREAM.INFO.{name}", b"")
            if info.get("created") != made:
                raise errors.CLUSTER_REFUSED(
                    f"the NATS stream {name} was made anew while the run went on: what the nodes "
                    "had agreed on is gone, and the run cannot go on"
                )
        headers = {"Nats-Msg-Id": secrets.token_hex(16)}
        await api(connection, self.keys.subject("link"), b"", headers=headers)


async def _make(connection: NatsConnection, stream: Stream, servers: int) -> str:
    """Makes a stream that is not there yet; returns the time at which it was made."""
    subject = f"$JS.API.STREAM.CREATE.{stream.name}"
    expected = (OTHER_CONFIGURATION, NOT_CLUSTERED, NO_PEERS)
    answer: dict[str, Any] = {}
    error: dict[str, Any] = {}
    # Three, unless fewer servers are known. Where one of three is only down for now, this waits for
    # it: a run kept by two would stop with the first of them that dies.
    for count in (REPLICAS, min(servers, 2), 1):
        body = {**stream.config, "num_replicas": count}
        answer = await api(connection, subject, body, expected=expected)
        error = answer.get("error", {})
        few = error.get("err_code") == NO_PEERS and servers < REPLICAS
        if not few and error.get("err_code") != NOT_CLUSTERED:
            break
    if error and error["err_code"] != OTHER_CONFIGURATION:
        raise errors.CLUSTER_UNREACHABLE(f"JetStream cannot keep the run: {error['description']}")
    if error:
        answer = await api(connection, f"$JS.API.STREAM.INFO.{stream.name}", b"")
        if any(answer["config"].get(key) != value for key, value in stream.config.items()):
            raise errors.CLUSTER_REFUSED(
                f"the NATS servers hold a stream {stream.name} that this version has not made: "
                "give the run another cluster.run_id, or delete the stream"
            )
    return str(answer["created"])


# Receives a message of a stream: its number, its subject below the stream's, its bytes.
OnStored = Callable[[int, str, bytes], None]


class Follower:
    """Delivers the messages of one stream; ``last`` is the number of the last one delivered."""

    def __init__(self, dialer: Dialer, stream: Stream, on_stored: OnStored) -> None:
        self.last = 0
        self._moved = asyncio.Event()
        self._dialer = dialer
        self._stream = stream
        self._on_stored = on_stored

    async def run(self) -> None:
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
        while self.last < number:
            await self._moved.wait()

    async def _follow(self, connection: NatsConnection) -> None:
        arrived: asyncio.Queue[Message | None] = asyncio.Queue(WAITING_MAX)

        async def on_message(message: Message | None) -> None:
            if not arrived.full():
                arrived.put_nowait(message)

        def on_end() -> None:
            if not arrived.full():
                arrived.put_nowait(None)

        async with connection.subscribed(self._stream.sent_on, on_message, on_end):
            await connection.settle()
            missed, catching = True, None
            try:
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
                    else:
                        missed |= message is not None and not self._deliver(message, live=True)
            finally:
                if catching is not None:
                    catching.cancel()
                    await asyncio.gather(catching, return_exceptions=True)

    async def _catch_up(self, connection: NatsConnection) -> None:
        """Delivers all that the stream's leader has by now."""
        while not connection.ended.is_set():
            try:
                present = await self._stream.last(connection)
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
        inbox, before = connection.new_inbox(), self.last
        asked = {"seq": before + 1, "next_by_subj": self._stream.subjects}
        asked |= {"batch": BATCH_MESSAGES, "max_bytes": BATCH_BYTES}
        subject, data = f"$JS.API.DIRECT.GET.{self._stream.name}", json.dumps(asked).encode()
        try:
            async with connection.subscribed(inbox, arrived.put):
                await connection.publish(subject, data, reply=inbox)
                while True:
                    async with asyncio.timeout(REQUEST_SECONDS):
                        message = await arrived.get()
                    if "Status" in (message.headers or {}):
                        break
                    self._deliver(message)
        except TimeoutError:
            raise errors.CLUSTER_UNREACHABLE("JetStream does not answer") from None
        if self.last == before:
            await asyncio.sleep(AGAIN_SECONDS)

    def _missing(self) -> None:
        self._dialer.note(self, self._dialer.patience)

    def _deliver(self, message: Message, *, live: bool = False) -> bool:
        """Delivers a message later than the last; a ``live`` one only where none before it is
        missing, else it returns ``False``.
        """
        headers = message.headers or {}
        number = int(headers.get("Nats-Sequence", 0))
        if live and number > self.last + 1:
            return False
        if number > self.last:
            self.last = number
            prefix = self._stream.subjects.removesuffix(">")
            key = headers.get("Nats-Subject", "").removeprefix(prefix)
            self._on_stored(number, key, message.data)
            # What waits holds the old event; each message is a new one.
            self._moved.set()
            self._moved = asyncio.Event()
        return True
