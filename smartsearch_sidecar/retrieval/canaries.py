"""Canaries: recorded questions and answers that show whether a remote index is still the same.

A remote retriever's identity is only declared. A canary makes the declaration testable: a query,
its top-n, and the ids and digests of the documents it was answered with when it was recorded. They
are compared as sets, because the order of near ties depends on how a retriever batches.

The file is JSON Lines, one canary a line::

    {"query": "...", "top_n": 5, "documents": [{"id": "12", "contents_sha256": "<64 hex>"}, ...]}
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.retrieval.provider import Provider
from smartsearch_sidecar.run.json_values import is_sha256

FILE_BYTES_MAX: Final = 16 * 1024 * 1024  # a canary is under 10 KB
CANARY_SECONDS: Final = 60.0
"""Between two rounds. Not a key, because one value serves every run: what a swapped index answers
reaches a minute of rollouts at most before the latch closes, and tens of canaries are no load."""
TRANSPORT_FAULTS_MAX: Final = 3  # rounds in a row: one lost connection proves nothing


class Canary(NamedTuple):
    """A recorded search: ``documents`` are pairs of id and sha256 of the contents' UTF-8 bytes."""

    query: str
    top_n: int
    documents: tuple[tuple[str, str], ...]

    def differing(self, documents: Sequence[Mapping[str, Any]]) -> str | None:
        """How an answer differs from the record, as a clause for a message; ``None`` where it does
        not. Bounded, however long the retriever's ids are; the query itself may be anything, so its
        digest stands for it.
        """
        recorded, answered = dict(self.documents), dict(_pairs(documents))
        if recorded == answered:
            return None
        parts = [f"canary {hashlib.sha256(self.query.encode()).hexdigest()[:16]}"]
        for word, names in (
            ("missing", recorded.keys() - answered.keys()),
            ("new", answered.keys() - recorded.keys()),
            ("changed", {i for i in recorded.keys() & answered if recorded[i] != answered[i]}),
        ):
            if names:
                shown = ", ".join(repr(name[:40]) for name in sorted(names)[:3])
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                parts.append(f"{word} ids {shown}{more}")
        return ", ".join(parts)


def load(path: Path) -> tuple[Canary, ...]:
    """Reads a canary file; blocking. Raises ``ConfigError`` naming file, line and what is wrong."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise errors.CONFIG_INVALID(
            f"canary file {path} cannot be read ({error.strerror}); record one, or correct "
            "retrieval.flashrag.canaries"
        ) from error
    if len(content) > FILE_BYTES_MAX:
        raise errors.CONFIG_INVALID(f"canary file {path} is over {FILE_BYTES_MAX} bytes")
    canaries = []
    for number, line in enumerate(content.splitlines(), start=1):
        if line.strip():
            canary = _parse(line)
            if isinstance(canary, str):
                raise errors.CONFIG_INVALID(
                    f"canary file {path}, line {number}: {canary}; record it again"
                )
            canaries.append(canary)
    if not canaries:
        raise errors.CONFIG_INVALID(f"canary file {path} holds no canary; record some, or unset it")
    return tuple(canaries)


def dump(canaries: Iterable[Canary]) -> bytes:
    lines = []
    for canary in canaries:
        documents = [{"id": name, "contents_sha256": digest} for name, digest in canary.documents]
        value = {"query": canary.query, "top_n": canary.top_n, "documents": documents}
        lines.append(orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE))
    return b"".join(lines)


def _parse(line: bytes) -> Canary | str:
    """A canary, or what is wrong with the line."""
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return "not JSON"
    if not isinstance(value, dict) or set(value) != {"query", "top_n", "documents"}:
        return "not an object of exactly query, top_n and documents"
    query, top_n, documents = value["query"], value["top_n"], value["documents"]
    if not isinstance(query, str) or not query.strip():
        return "query is not a non-empty string"
    if type(top_n) is not int or top_n < 1:
        return "top_n is not a positive whole number"
    if not isinstance(documents, list) or not 0 < len(documents) <= top_n:
        return "documents is not a list of 1 to top_n documents"
    pairs: dict[str, str] = {}
    for document in documents:
        if not isinstance(document, dict) or set(document) != {"id", "contents_sha256"}:
            return "a document is not an object of exactly id and contents_sha256"
        name, digest = document["id"], document["contents_sha256"]
        if not isinstance(name, str) or not name or name in pairs:
            return "a document's id is empty, repeated or not a string"
        if not is_sha256(digest):
            return "contents_sha256 is not 64 lower-case hex digits"
        pairs[name] = digest
    return Canary(query, top_n, tuple(pairs.items()))


async def record(provider: Provider, queries: Sequence[str], *, top_n: int) -> list[Canary]:
    """Asks each query and keeps what came; repeated queries once.

    Each is asked twice, alone and beside all others: a retriever that ranks differently in a batch
    would close the latch of a good run. Raises ``UsageError`` naming a query that is answered
    differently the second time, or with nothing; and what the provider raises.
    """
    distinct = list(dict.fromkeys(queries))
    canaries = [
        Canary(query, top_n, _pairs(await provider.search(query, top_n))) for query in distinct
    ]
    again = await asyncio.gather(
        *(provider.search(query, top_n) for query in distinct), return_exceptions=True
    )
    for number, (canary, answer) in enumerate(zip(canaries, again, strict=True), start=1):
        if not canary.documents:
            raise errors.USAGE(
                f"query {number} is answered with no document and defends nothing; choose another"
            )
        if isinstance(answer, BaseException):
            raise answer
        if (difference := canary.differing(answer)) is not None:
            raise errors.USAGE(
                f"query {number} is answered differently beside others ({difference}) "
                "and would close the latch of a good run; choose another"
            )
    return canaries


async def check(provider: Provider, canaries: Sequence[Canary]) -> None:
    """Raises ``IdentityChanged`` that says which canaries are answered differently and how, and
    what the provider raises. One after the other, so that a round never crowds out the rollouts'
    searches.
    """
    differences = []
    for canary in canaries:
        difference = canary.differing(await provider.search(canary.query, canary.top_n))
        if difference is not None:
            differences.append(difference)
    if differences:
        more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise errors.IDENTITY_CHANGED(
            "the retriever does not serve the recorded corpus or index: "
            f"{len(differences)} of {len(canaries)} canaries differ: "
            f"{'; '.join(differences[:3])}{more}"
        )


def _pairs(documents: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    pairs: dict[str, str] = {}
    for document in documents:
        name, contents = document.get("id"), document.get("contents")
        if not isinstance(name, str) or not isinstance(contents, str) or name in pairs:
            what = "a document without id or contents, or with one twice"
            raise errors.PROVIDER_FAULT(f"a canary was answered with {what}")
        pairs[name] = hashlib.sha256(contents.encode()).hexdigest()
    return tuple(pairs.items())


@dataclass(eq=False)
class CanaryWatch:
    """Asks the canaries every ``seconds`` and holds the verdict.

    ``fault`` is ``None`` while the identity holds. ``IdentityChanged`` stays for good; a fault of
    reaching or asking the retriever lasts until a round succeeds. ``on_fault`` is called on the
    loop after each failing round, so that a latch can close without waiting for the next search.
    """

    provider: Provider
    canaries: Sequence[Canary]
    seconds: float
    on_fault: Callable[[errors.RetrievalError], None]
    fault: errors.RetrievalError | None = None
    _unreached: int = 0
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins the rounds, the first after ``seconds``."""
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def close(self) -> None:
        """Ends the rounds."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            raise error

    async def round(self) -> None:
        """Asks every canary once and sets ``fault``; raises nothing but cancellation."""
        try:
            await check(self.provider, self.canaries)
        except errors.ProviderTransport as error:
            self._unreached += 1
            if self._unreached >= TRANSPORT_FAULTS_MAX:
                times = f"{self._unreached} times in a row: {error.message}"
                self._fail(errors.PROVIDER_FAULT(f"the canaries could not be asked {times}"))
        except errors.RetrievalError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - classified: becomes the watch's fault
            # Without this the timer would end in silence and the run would go on undefended.
            self._fail(errors.PROVIDER_FAULT(f"asking a canary raised {type(error).__name__}"))
        else:
            self._unreached = 0
            if not errors.IDENTITY_CHANGED.matches(self.fault):
                self.fault = None

    async def _watch(self) -> None:
        while not errors.IDENTITY_CHANGED.matches(self.fault):
            await asyncio.sleep(self.seconds)
            await self.round()

    def _fail(self, fault: errors.RetrievalError) -> None:
        if errors.IDENTITY_CHANGED.matches(self.fault):
            return
        self.fault = fault
        self.on_fault(fault)
