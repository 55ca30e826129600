"""The ``Bus`` on NATS JetStream: one bucket of keys and one stream per run.

The bucket is an ordinary key-value bucket (``nats kv`` shows it) without direct reads, so that a
value is always the leader's. Every write carries an id of its own, and the servers do not keep the
same id twice. So a write whose fate is unknown may be tried again.

Apart from ``gate/cluster.py``, which opens it, so that only this folder speaks NATS.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.bus import Bus, Entry, OnLink, OnMessage, OnQuestion, OnValue
from smartsearch_sidecar.cluster.nats.connection import Dialer, Message, NatsConnection
from smartsearch_sidecar.cluster.nats.streams import Follower, Streams, api, decoded
from smartsearch_sidecar.config import ClusterSection

PATIENCE_SECONDS: Final = 12.0  # of every call: NATS elects a new leader in four to nine
PULSE_SECONDS: Final = 1.0  # between two looks at a server, unless lost_seconds is short
PULSES: Final = 5  # looks at a server within lost_seconds, at least
START_SECONDS: Final = 30.0  # of ``connect``: the servers of a run may be starting beside it
ID_BYTES: Final = 16
KEY: Final = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
WRONG_LAST_SEQUENCE: Final = (10071, 10164)  # JetStream's for: the key has another revision


async def connect(
    cluster: ClusterSection, run_id: str, *, on_link: OnLink, seconds: float = START_SECONDS
) -> Bus:
    """The bus of the run ``run_id``; its streams are made where no node has made them yet.

    ``on_link`` is called at every later loss and return, not for this first connection.

    Raises ``ClusterUnreachable`` where the servers do not answer within ``seconds``,
    ``ClusterRefused`` where what they hold under the run's name is not ours.
    """
    urls = cluster.nats_url.get_secret_value().split(",")
    dialer = Dialer(
        urls,
        f"smartsearch-sidecar {cluster.node}",
        on_link,
        patience=min(PATIENCE_SECONDS, cluster.lost_seconds),
        pulse=min(PULSE_SECONDS, cluster.lost_seconds / PULSES),
    )
    bus = NatsBus(dialer, run_id)
    try:
        await dialer.dial()
        await bus.begin(seconds)
    except BaseException:
        await bus.close()
        raise
    return bus


class NatsBus:
    def __init__(self, dialer: Dialer, run_id: str) -> None:
        self._dialer = dialer
        self._streams = Streams(run_id)
        self._ask_subject = f"smartsearch.{run_id}.ask"
        self._self = secrets.token_bytes(ID_BYTES)
        self._keys: Follower | None = None
        self._values: dict[str, bytes] = {}
        self._watches: list[Callable[[str, bytes], None]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def connected(self) -> bool:
        return self._dialer.connected

    async def begin(self, seconds: float) -> None:
        dialer = self._dialer
        await dialer.call(lambda c: self._streams.make(c, len(dialer.urls)), seconds)
        dialer.begin(self._streams.prove)

    async def get(self, key: str) -> Entry | None:
        subject = self._subject(key)
        message = await self._dialer.call(lambda c: self._streams.keys.message(c, subject))
        return Entry(decoded(message, "data"), message["seq"]) if message else None

    async def update(self, key: str, value: bytes, revision: int) -> bool:
        subject, mark = self._subject(key), secrets.token_hex(ID_BYTES)
        headers = {"Nats-Msg-Id": mark, "Nats-Expected-Last-Subject-Sequence": str(revision)}
        unknown = False

        async def attempt(connection: NatsConnection) -> bool:
            nonlocal unknown
            try:
                expected = WRONG_LAST_SEQUENCE
                answer = await api(connection, subject, value, headers=headers, expected=expected)
                if "error" not in answer:
                    return True
                # The change may be our own earlier try: a server alone compares the revision before
                # it looks at the id.
                if not unknown:
                    return False
                message = await self._streams.keys.message(connection, subject)
            except errors.ClusterUnreachable:
                unknown = True
                raise
            return mark.encode() in decoded(message or {}, "hdrs")

        return await self._dialer.call(attempt)

    async def put(self, key: str, value: bytes) -> None:
        await self._append(self._subject(key), value)

    async def watch(self, prefix: str, on_value: OnValue) -> None:
        name, keys = prefix.rstrip("."), self._streams.keys

        def deliver(key: str, value: bytes) -> None:
            # An empty prefix is every key; any other is the key itself and those below it.
            if not name or key == name or key.startswith(f"{name}."):
                on_value(key, value)

        present = await self._dialer.call(keys.last)
        if self._keys is None:
            self._keys = Follower(self._dialer, keys, self._changed)
            self._go_on(self._keys.run(), vital=True)
        why = f"NATS does not deliver the values under {prefix!r}: check its servers"
        await self._patiently(self._keys.reaches(present), why)
        for key, value in self._values.items():
            deliver(key, value)
        self._watches.append(deliver)

    def _changed(self, _: int, key: str, value: bytes) -> None:
        # Kept in the order of the changes, for watches that begin later.
        self._values.pop(key, None)
        self._values[key] = value
        for deliver in self._watches:
            deliver(key, value)

    async def publish(self, data: bytes) -> int:
        return await self._append(self._streams.answers.subjects, data)

    async def read(self, on_message: OnMessage) -> None:
        def on_stored(number: int, _: str, data: bytes) -> None:
            on_message(number, data)

        follower = Follower(self._dialer, self._streams.answers, on_stored)
        self._go_on(follower.run(), vital=True)

    async def last(self) -> int:
        return await self._dialer.call(self._streams.answers.last)

    async def ask(self, question: bytes, *, answers: int, seconds: float) -> Sequence[bytes]:
        found: dict[bytes, bytes] = {}
        asked = False
        woken = asyncio.Event()

        async def on_message(message: Message) -> None:
            # Without an id it is the server's notice that no node listens.
            if len(message.data) >= ID_BYTES:
                found.setdefault(message.data[:ID_BYTES], message.data[ID_BYTES:])
                if len(found) >= answers:
                    woken.set()

        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                # Asked again over each new connection; a node that answers twice counts once.
                while len(found) < answers:
                    connection = await self._dialer.reach()
                    inbox = connection.new_inbox()
                    woken.clear()
                    try:
                        async with connection.subscribed(inbox, on_message, woken.set):
                            await connection.publish(self._ask_subject, question, reply=inbox)
                            asked = True
                            await woken.wait()
                    except errors.ClusterUnreachable:
                        connection.end("the NATS server did not take a question")
                    else:
                        asked = not connection.ended.is_set()
        if not asked and not found and answers > 0:
            raise errors.CLUSTER_UNREACHABLE("NATS does not take questions to other nodes")
        return list(found.values())[:answers]

    async def answer(self, on_question: OnQuestion) -> None:
        listening = asyncio.Event()

        async def reply(connection: NatsConnection, message: Message) -> None:
            answer = await on_question(message.data)
            # Sent once: over a lost connection, the node that asks asks again by itself.
            await connection.publish(message.reply, self._self + answer)

        async def listen() -> None:
            while True:
                connection = await self._dialer.reach()

                async def on_message(
                    message: Message, connection: NatsConnection = connection
                ) -> None:
                    # A task of its own: an answer may take its time, and others ask meanwhile.
                    if message.reply:
                        self._go_on(reply(connection, message))

                try:
                    await connection.subscribe(self._ask_subject, on_message)
                    await connection.settle()
                except errors.ClusterUnreachable:
                    connection.end("the NATS server did not take a subscription")
                    continue
                listening.set()
                await connection.ended.wait()

        self._go_on(listen())
        await self._patiently(listening.wait(), "NATS brings no questions of other nodes")

    async def _patiently(self, work: Awaitable[object], why: str) -> None:
        try:
            async with asyncio.timeout(self._dialer.patience):
                await work
        except TimeoutError:
            raise errors.CLUSTER_UNREACHABLE(why) from None

    async def close(self) -> None:
        # First the dialer: what ends after it is not reported as a loss.
        await self._dialer.close()
        for task in (tasks := tuple(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _go_on(self, work: Coroutine[Any, Any, None], *, vital: bool = False) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._done(task, vital))

    def _done(self, task: asyncio.Task[None], vital: bool) -> None:
        self._tasks.discard(task)
        exc = None if task.cancelled() else task.exception()
        if exc is None or isinstance(exc, errors.ClusterUnreachable):
            return
        # A callback must not raise. What it missed cannot be made up for, so a node that follows
        # no stream any more counts as not connected at once.
        if vital:
            self._dialer.note(task, 0)
        asyncio.get_running_loop().call_exception_handler(
            {"message": "a task that serves other nodes failed", "exception": exc, "task": task}
        )

    def _subject(self, key: str) -> str:
        if KEY.fullmatch(key) is None:
            why = f"{key!r} is not a key: words of A-Z a-z 0-9 _ - between dots"
            raise errors.INTERNAL_ERROR(why)
        return self._streams.keys.subject(key)

    async def _append(self, subject: str, data: bytes) -> int:
        headers = {"Nats-Msg-Id": secrets.token_hex(ID_BYTES)}
        answer = await self._dialer.call(lambda c: api(c, subject, data, headers=headers))
        return int(answer["seq"])
