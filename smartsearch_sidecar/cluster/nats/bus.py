"""The nodes' common ground on NATS JetStream: one bucket of keys and one stream per run.

The bucket is an ordinary key-value bucket (``nats kv`` shows it) without direct reads, so that a
value is always the leader's. Every write carries an id of its own: what the servers have already
kept they do not keep again, and so a write may be tried again when nobody knows what became of it.

What may break on the way, and when it is tried again, is in ``nats_link``; how streams are
followed in ``nats_follow``; what is nats-py's in ``nats_session``.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final

from smartsearch_sidecar import errors
from smartsearch_sidecar.cluster.bus import Asked, Bus, Entry, Heard, Linked, Read
from smartsearch_sidecar.cluster.nats.connection import Message, Session
from smartsearch_sidecar.cluster.nats.dialer import Link
from smartsearch_sidecar.cluster.nats.follower import Following
from smartsearch_sidecar.cluster.nats.streams import Streams, api, decoded, last_message
from smartsearch_sidecar.config import ClusterSection

PATIENCE_SECONDS: Final = 12.0
"""The bound of every call: NATS takes four to nine to have a new leader where one has died."""

PULSE_SECONDS: Final = 1.0
PULSES: Final = 5
"""How often a server is looked at: each second, or this often within ``lost_seconds``."""

START_SECONDS: Final = 30.0
"""The bound of ``connect``: the servers of a run may be starting beside it."""

ID_BYTES: Final = 16
KEY: Final = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")

# JetStream's numbers for: the key has another revision.
WRONG_LAST_SEQUENCE: Final = (10071, 10164)


async def connect(
    cluster: ClusterSection,
    run_id: str,
    *,
    linked: Linked,
    replicas: int | None = None,
    seconds: float = START_SECONDS,
) -> Bus:
    """The common ground of the run ``run_id``, made where no node has made it yet.

    Every value is kept by ``replicas`` servers: by default by three, or by as many as there are.
    ``linked`` is told of every later loss and return, not of this first connection.

    Raises:
        ClusterUnreachable: the servers did not answer within ``seconds``.
        ClusterRefused: what the servers hold under the run's name is not ours.
    """
    urls = cluster.nats_url.get_secret_value().split(",")
    link = Link(
        urls,
        f"smartsearch-sidecar {cluster.node}",
        linked,
        patience=min(PATIENCE_SECONDS, cluster.lost_seconds),
        pulse=min(PULSE_SECONDS, cluster.lost_seconds / PULSES),
    )
    bus = NatsBus(link, run_id)
    try:
        await link.dial()
        await bus.begin(replicas, seconds)
    except BaseException:
        await bus.close()
        raise
    return bus


class NatsBus:
    """``Bus`` over a ``Link``."""

    def __init__(self, link: Link, run_id: str) -> None:
        self._link = link
        self._streams = Streams(run_id)
        self._ask_subject = f"smartsearch.{run_id}.ask"
        self._self = secrets.token_bytes(ID_BYTES)
        self._keys: Following | None = None
        self._values: dict[str, bytes] = {}
        self._watches: list[Callable[[str, bytes], None]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def connected(self) -> bool:
        return self._link.connected

    async def begin(self, replicas: int | None, seconds: float) -> None:
        """Makes bucket and stream, or finds them as other nodes have made them."""

        known = self._link
        await known.call(lambda s: self._streams.make(s, replicas, known.servers), seconds)
        known.begin(self._streams.prove)

    async def get(self, key: str) -> Entry | None:
        subject = self._subject(key)
        message = await self._link.call(lambda s: last_message(s, self._streams.keys.name, subject))
        return Entry(decoded(message, "data"), message["seq"]) if message else None

    async def create(self, key: str, value: bytes) -> bool:
        return await self.update(key, value, 0)

    async def update(self, key: str, value: bytes, revision: int) -> bool:
        subject = self._subject(key)
        mark = secrets.token_hex(ID_BYTES)
        headers = {"Nats-Msg-Id": mark, "Nats-Expected-Last-Subject-Sequence": str(revision)}
        unknown = False

        async def attempt(session: Session) -> bool:
            nonlocal unknown
            try:
                answer = await api(
                    session, subject, value, headers=headers, expected=WRONG_LAST_SEQUENCE
                )
                if "error" not in answer:
                    return True
                # An earlier try of ours may be what changed it: a server alone compares first.
                if not unknown:
                    return False
                message = await last_message(session, self._streams.keys.name, subject)
            except errors.ClusterUnreachable:
                unknown = True
                raise
            return mark.encode() in decoded(message or {}, "hdrs")

        return await self._link.call(attempt)

    async def put(self, key: str, value: bytes) -> None:
        await self._append(self._subject(key), value)

    async def watch(self, prefix: str, heard: Heard) -> None:
        word = prefix.rstrip(".")
        keys = self._streams.keys

        def tell(key: str, value: bytes) -> None:
            # An empty prefix is every key; a word is the key itself and those below it.
            if not word or key == word or key.startswith(f"{word}."):
                heard(key, value)

        present = await self._link.call(lambda s: last_message(s, keys.name, keys.subjects))
        if self._keys is None:
            self._keys = Following(self._link, keys, self._changed)
            self._go_on(self._keys.run(), vital=True)
        try:
            async with asyncio.timeout(self._link.patience):
                await self._keys.reaches(present["seq"] if present else 0)
        except TimeoutError:
            raise errors.CLUSTER_UNREACHABLE(
                f"NATS does not tell what is set under {prefix!r}: check its servers"
            ) from None
        for key, value in self._values.items():
            tell(key, value)
        self._watches.append(tell)

    def _changed(self, number: int, key: str, value: bytes) -> None:
        del number
        # Kept in the order of the changes, for watches that begin later.
        self._values.pop(key, None)
        self._values[key] = value
        for tell in self._watches:
            tell(key, value)

    async def publish(self, data: bytes) -> int:
        return await self._append(self._streams.answers.subjects, data)

    async def read(self, read: Read) -> None:
        following = Following(
            self._link, self._streams.answers, lambda number, _, data: read(number, data)
        )
        self._go_on(following.run(), vital=True)

    async def last(self) -> int:
        answers = self._streams.answers
        message = await self._link.call(lambda s: last_message(s, answers.name, answers.subjects))
        return int(message["seq"]) if message else 0

    async def ask(self, question: bytes, *, answers: int, seconds: float) -> Sequence[bytes]:
        heard: dict[bytes, bytes] = {}
        asked = False
        enough = asyncio.Event()

        async def hear(message: Message) -> None:
            # Without an id it is the server's word that nobody listens.
            if len(message.data) >= ID_BYTES:
                heard.setdefault(message.data[:ID_BYTES], message.data[ID_BYTES:])
                if len(heard) >= answers:
                    enough.set()

        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                # Asked again over a new session; a node that answers twice counts once.
                while len(heard) < answers:
                    session = await self._link.reach()
                    inbox = session.new_inbox()
                    try:
                        subscription = await session.subscribe(inbox, hear)
                        await session.publish(self._ask_subject, question, reply=inbox)
                    except errors.ClusterUnreachable:
                        session.end("the NATS server did not take a question")
                        continue
                    asked = True
                    try:
                        await _either(enough, session.ended)
                    finally:
                        await session.unsubscribe(subscription)
                    asked = not session.ended.is_set()
        if not asked and not heard and answers > 0:
            raise errors.CLUSTER_UNREACHABLE("NATS does not take questions to other nodes")
        return list(heard.values())[:answers]

    async def answer(self, asked: Asked) -> None:
        listening = asyncio.Event()

        async def tell(session: Session, message: Message) -> None:
            answer = await asked(message.data)
            # Who asked hears of a lost connection by itself.
            await session.publish(message.reply, self._self + answer)

        async def listen() -> None:
            while True:
                session = await self._link.reach()

                async def hear(message: Message, session: Session = session) -> None:
                    # A task of its own: an answer may take its time, and others ask meanwhile.
                    if message.reply:
                        self._go_on(tell(session, message))

                try:
                    await session.subscribe(self._ask_subject, hear)
                    await session.settle()
                except errors.ClusterUnreachable:
                    session.end("the NATS server did not take a subscription")
                    continue
                listening.set()
                await session.ended.wait()

        self._go_on(listen())
        try:
            async with asyncio.timeout(self._link.patience):
                await listening.wait()
        except TimeoutError:
            raise errors.CLUSTER_UNREACHABLE("NATS brings no questions of other nodes") from None

    async def close(self) -> None:
        # First the link: what ends after it tells nobody.
        await self._link.close()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _go_on(self, work: Coroutine[Any, Any, None], *, vital: bool = False) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._done(task, vital))
        return task

    def _done(self, task: asyncio.Task[None], vital: bool) -> None:
        self._tasks.discard(task)
        exc = None if task.cancelled() else task.exception()
        if exc is None or isinstance(exc, errors.ClusterUnreachable):
            return
        # What hears and answers must not raise. Nothing that was missed is made up for.
        if vital:
            self._link.note(task, 0)
        asyncio.get_running_loop().call_exception_handler(
            {"message": "hearing other nodes failed", "exception": exc, "task": task}
        )

    def _subject(self, key: str) -> str:
        if KEY.fullmatch(key) is None:
            raise errors.INTERNAL_ERROR(
                f"{key!r} is not a key: words of A-Z a-z 0-9 _ - between dots"
            )
        return self._streams.key(key)

    async def _append(self, subject: str, data: bytes) -> int:
        headers = {"Nats-Msg-Id": secrets.token_hex(ID_BYTES)}
        answer = await self._link.call(lambda s: api(s, subject, data, headers=headers))
        return int(answer["seq"])


async def _either(first: asyncio.Event, second: asyncio.Event) -> None:
    """Returns when one of two events is set."""
    waiting = [asyncio.ensure_future(event.wait()) for event in (first, second)]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()
