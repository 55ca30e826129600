"""The one guard around all providers: identity, limits, retries, classification, document checks;
and in front of it the cache: identical searches in flight are shared, repeats of one are cached.

A provider may raise anything and answer anything; what leaves this module is either ``Found`` or
one of the named retrieval errors. The rules for a document are the reference's: exactly ``id``,
``contents`` and optionally ``score``; id and contents non-empty after strip; ids distinct; passages
joined by one blank line.

A search runs in a task of its own, so that a caller that leaves or runs out of time neither cancels
it for others nor waits for it: its late result is dropped, or serves the next request that asks
alike.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal

from cachetools import LRUCache

from smartsearch_sidecar import errors
from smartsearch_sidecar.retrieval.passages import (
    Found,
    Passage,
    blank_id,
    digests_of_normal_forms,
    found_of,
    read_passage,
)
from smartsearch_sidecar.retrieval.provider import Provider
from smartsearch_sidecar.run.json_values import canonical_digest, differences, is_sha256
from smartsearch_sidecar.stalls import Stalls

RETRY_SECONDS: Final = 0.25
"""The pause before the first further try: a retriever that is being restarted refuses connections
for about a second, so a try at once would meet the same."""
RETRY_GROWTH: Final = 4
RETRY_SECONDS_MAX: Final = 2.0  # of one pause: 0.25 s, 1 s, then 2 s each

CLOSE_SECONDS: Final = 5.0  # a provider that swallows a cancellation must not hold the drain

Outcome = Literal["miss", "shared", "hit"]
Key = tuple[str, int | None]  # a query and its passages at most; ``None``: the contract's number


class Guard:
    """Owns every call to the provider of a run."""

    def __init__(
        self,
        provider: Provider,
        *,
        top_n: int,
        retries: int,
        drop_tagged: bool,
        watch_drift: bool,
        stalls: Stalls | None = None,
    ) -> None:
        """``top_n`` passages where a search does not say how many; ``retries`` further tries after
        a transport fault; ``drop_tagged`` leaves passages out that carry a protocol tag, are blank
        or come a second time, which are ``DocumentInvalid`` otherwise; ``watch_drift`` remembers a
        digest (16 bytes with its id) per document of a remote provider; ``stalls`` is where each
        search stands while it lasts.
        """
        self.provider = provider
        self._stalls = stalls or Stalls()
        self.top_n = top_n
        self._retries = retries
        self._drop_tagged = drop_tagged
        self._seen: dict[bytes, bytes] | None = {} if watch_drift and provider.remote else None
        self.identity: dict[str, Any] = {}
        self.identity_sha256 = ""

    async def claim_identity(self) -> dict[str, Any]:
        """Asks the provider what it serves, and holds it to that from now on.

        Raises ``ConfigError`` where the identity lacks a digest, ``ProviderFault`` where the
        provider could not say.
        """
        identity = await self._ask_identity()
        for key in ("corpus_sha256", "index_sha256"):
            if not is_sha256(identity.get(key)):
                raise errors.CONFIG_INVALID(
                    f"the retrieval provider {self.provider.name} names no {key} of 64 lower-case "
                    "hex digits: a corpus that cannot be named cannot be frozen"
                )
        self.identity = identity
        self.identity_sha256 = canonical_digest(identity)
        return identity

    async def _ask_identity(self) -> dict[str, Any]:
        try:
            return dict(await self.provider.identity())
        except errors.SidecarError:
            raise
        except Exception as exc:  # a provider may raise anything: classified here, once
            said = f"the provider could not say what it serves ({type(exc).__name__})"
            raise errors.PROVIDER_FAULT(said) from exc

    async def check_identity(self) -> None:
        """Raises ``IdentityChanged`` where corpus or index are not those of the claim."""
        now = await self._ask_identity()
        # By Python's equality, as the reference compares: 1 and true name one setting here.
        if now != self.identity:
            changed = ", ".join(differences(now, self.identity))
            raise errors.IDENTITY_CHANGED(
                f"the provider's identity changed during the run: {changed}"
            )

    async def search(self, query: str, deadline: float, top_n: int | None = None) -> Found:
        """One search, and the identity checked after it. Raises a ``RetrievalError``.

        After ``deadline`` (loop clock) no further try begins. The search itself is not bounded
        here: its caller bounds the wait (``CachedSearch.find``).
        """
        asked = self.top_n if top_n is None else top_n
        with self._stalls.call("provider", "search", deadline, errors.DEADLINE_PASSED):
            documents, tries = await self._ask(query, deadline, asked)
            await self.check_identity()
        try:
            found = self._found(documents, asked)
            return found if tries == 1 else found._replace(tries=tries)
        except errors.SidecarError:
            raise
        except Exception as exc:  # a provider's own objects may raise when read: classified here
            said = f"the provider's documents could not be read ({type(exc).__name__})"
            raise errors.DOCUMENT_INVALID(said) from exc

    async def _ask(self, query: str, deadline: float, top_n: int) -> tuple[Any, int]:
        """What the provider answered, unread, and to which try."""
        loop = asyncio.get_running_loop()
        pause = RETRY_SECONDS
        for tries in range(1, self._retries + 2):
            began = loop.time()
            try:
                return await self.provider.search(query, top_n), tries
            except errors.ProviderTransport as exc:
                # A try that could not last as long as this one did is not made: of a retriever that
                # hangs, the deadline would say less than its own fault does.
                took = loop.time() - began
                if tries > self._retries or loop.time() + pause + took >= deadline:
                    if tries == 1:
                        raise
                    raise exc.failure(f"{exc.message} (try {tries})") from exc
            except errors.SidecarError:
                raise
            except Exception as exc:  # a provider may raise anything: classified here, once
                said = f"the provider failed during a search ({type(exc).__name__})"
                raise errors.PROVIDER_FAULT(said) from exc
            await asyncio.sleep(pause)
            pause = min(pause * RETRY_GROWTH, RETRY_SECONDS_MAX)
        raise errors.INTERNAL_ERROR("a search ended without an answer or an error")

    def _found(self, documents: Any, top_n: int) -> Found:
        if isinstance(documents, str | bytes | Mapping) or not hasattr(documents, "__len__"):
            kind = type(documents).__name__
            raise errors.DOCUMENT_INVALID(f"the provider answered a {kind} instead of documents")
        if len(documents) > top_n:
            raise errors.DOCUMENT_INVALID(
                f"the provider answered {len(documents)} documents where {top_n} were asked"
            )
        dropped: list[Mapping[str, str]] = []
        passages = self._read(documents, dropped)
        if len({passage.id for passage, _ in passages}) != len(passages):
            passages = self._each_once(passages, dropped)
        seen = self._seen
        for position, (passage, _) in enumerate(passages, 1):
            if seen is not None and passage.digest != seen.setdefault(passage.key, passage.digest):
                raise _drift(passage, seen[passage.key])
            if passage.tagged:
                if not self._drop_tagged:
                    raise errors.DOCUMENT_INVALID(
                        f"document {position} carries a protocol tag or a special token"
                    )
                dropped.append({"id": passage.id, "reason": "protocol_tag"})
        if dropped:
            passages = [pair for pair in passages if not pair[0].tagged]
        return found_of(passages, dropped)

    def _read(
        self, documents: Any, dropped: list[Mapping[str, str]]
    ) -> list[tuple[Passage, bytes]]:
        """Every document as a passage with its score; blank ones are told in ``dropped``. Raises
        ``DocumentInvalid``.
        """
        passages = []
        for position, item in enumerate(documents, 1):
            try:
                passages.append(read_passage(item, position))
            except errors.RetrievalError:
                if not self._drop_tagged or (blank := blank_id(item)) is None:
                    raise
                dropped.append({"id": blank, "reason": "blank"})
        return passages

    def _each_once(
        self, passages: Sequence[tuple[Passage, bytes]], dropped: list[Mapping[str, str]]
    ) -> list[tuple[Passage, bytes]]:
        """The first passage of each id; a further one must be the same, and is told in ``dropped``.
        Raises ``DocumentInvalid``.
        """
        kept: dict[str, tuple[Passage, bytes]] = {}
        for passage, score in passages:
            if passage.id not in kept:
                kept[passage.id] = passage, score
                continue
            if not self._drop_tagged or kept[passage.id][0].contents != passage.contents:
                raise errors.DOCUMENT_INVALID("the provider answered the same document id twice")
            dropped.append({"id": passage.id, "reason": "repeated_id"})
        return list(kept.values())


def _drift(passage: Passage, seen: bytes) -> errors.RetrievalError:
    """``seen`` is the digest of what the run saw under the passage's id before."""
    how = ""
    if seen in digests_of_normal_forms(passage.contents):
        how = " (another Unicode normal form of the same text)"
    return errors.DOCUMENT_DRIFT(
        f"document {passage.id[:80]!r} has other contents than earlier in this run{how}"
    )


class CachedSearch:
    """What the service asks: one query, one deadline, one named outcome."""

    def __init__(self, guard: Guard, *, cache_bytes: int) -> None:
        """``cache_bytes`` of 0 also turns the sharing of searches in flight off."""
        self.guard = guard
        self._share = cache_bytes > 0
        # By query and answer, least recently used first: values are sized without their keys.
        self.cache: LRUCache[Key, tuple[str, Found]] = LRUCache(
            cache_bytes, getsizeof=lambda kept: len(kept[0]) + kept[1].size
        )
        self._flights: dict[Key, asyncio.Task[Found]] = {}
        self._tasks: set[asyncio.Task[Found]] = set()

    async def find(
        self, query: str, deadline: float, top_n: int | None = None
    ) -> tuple[Found, Outcome]:
        """The documents of ``query``, and whether they cost a search. Raises ``DeadlinePassed`` at
        ``deadline`` (loop clock), or what the guard raised.
        """
        key = (query, None if top_n == self.guard.top_n else top_n)
        kept = self.cache.get(key)
        if kept is not None:
            return kept[1], "hit"
        outcome: Outcome = "shared"
        flight = self._flights.get(key)
        if flight is None:
            outcome = "miss"
            flight = self._start(key, deadline)
        return await _until(flight, deadline), outcome

    def _start(self, key: Key, deadline: float) -> asyncio.Task[Found]:
        query, top_n = key
        search = self.guard.search(query, deadline, top_n)
        loop = asyncio.get_running_loop()
        if sys.version_info >= (3, 12):
            # It runs at once as far as it can: one that need not wait costs no turn of the loop.
            task = asyncio.Task(search, loop=loop, eager_start=True)
        else:
            task = loop.create_task(search)
        if task.done():
            self._ended(key, task)
            return task
        self._tasks.add(task)
        if self._share:
            self._flights[key] = task
        task.add_done_callback(lambda done: self._ended(key, done))
        return task

    def _ended(self, key: Key, task: asyncio.Task[Found]) -> None:
        self._tasks.discard(task)
        if self._flights.get(key) is task:
            del self._flights[key]
        if not task.cancelled() and task.exception() is None and self._share:
            found = task.result()
            with suppress(ValueError):  # an answer larger than the whole cache is not kept
                self.cache[key] = (key[0], found if found.tries == 1 else found._replace(tries=1))

    async def close(self) -> None:
        """Cancels the searches still running, which no request awaits, and closes the provider. A
        search that goes on all the same is left behind.
        """
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
        await self.guard.provider.close()


async def _until(flight: asyncio.Task[Found], deadline: float) -> Found:
    """The flight's result, or ``DeadlinePassed``; neither the wait's end nor its cancellation
    touches the flight. One future and one timer: half of what ``timeout_at`` and ``shield`` cost.
    """
    if flight.done():
        return flight.result()
    loop = asyncio.get_running_loop()
    turn: asyncio.Future[None] = loop.create_future()

    def wake(_: object = None) -> None:
        if not turn.done():
            turn.set_result(None)

    flight.add_done_callback(wake)
    timer = loop.call_at(deadline, wake)
    try:
        await turn
    finally:
        timer.cancel()
        flight.remove_done_callback(wake)
    if not flight.done():
        raise errors.DEADLINE_PASSED("the search was still running at the deadline")
    return flight.result()
