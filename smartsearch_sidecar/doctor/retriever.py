"""The retriever: whether it opens, identifies itself, and finds a known passage.

Apart from ``scoring``, as retrieval and reward are apart.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from smartsearch_sidecar import errors
from smartsearch_sidecar.config import Config
from smartsearch_sidecar.contract.execute import TOP_N
from smartsearch_sidecar.doctor.findings import Finding, error, ok, warning
from smartsearch_sidecar.load_test.client_worker import STOCK_QUESTIONS
from smartsearch_sidecar.retrieval.guard import Guard
from smartsearch_sidecar.retrieval.passages import Found
from smartsearch_sidecar.retrieval.registry import Progress, open_configured
from smartsearch_sidecar.run.line import draft, encode_line
from smartsearch_sidecar.run.record import NativeCall, RetrievalAnswered, RetrievalRequested

SEARCH_BYTES: Final = 6 * 1024
"""Records of one search where none could be measured: five passages of 100 words, escaped."""
FOREIGN_ENVIRONMENT_BYTES: Final = 4 * 1024
"""An unmodified dataset's ``env`` text, kept with each search; only its digest is known here."""
MEASURED: Final = STOCK_QUESTIONS[:4]
"""Asked to find a passage, and to measure the records of a search."""
_WORDS_KEPT = 12  # of a passage, to ask for it


@dataclass(slots=True)
class Searched:
    """The findings, and the bytes that the records of one search take."""

    findings: list[Finding]
    search_bytes: int = SEARCH_BYTES


async def check_retriever(
    config: Config,
    *,
    question: str | None,
    passage: str | None,
    progress: Progress | None = None,
) -> Searched:
    """Opens the configured retriever, as ``serve`` does, and asks it.

    ``question`` must find something, and where ``passage`` is given, a passage that holds that
    text. Without a question one is made of a passage's own words, and must find that passage.
    """
    searched = Searched([])
    try:
        provider = await open_configured(config, progress)
    except errors.SidecarError as exc:
        searched.findings.append(error("retriever", exc.message))
        return searched
    try:
        guard = Guard(
            provider,
            top_n=TOP_N,
            retries=config.retrieval.retries,
            drop_tagged=config.retrieval.on_protocol_tag == "drop",
            watch_drift=False,
        )
        identity = await guard.claim_identity()
        searched.findings.append(
            ok(
                "retriever",
                f"{provider.name}, corpus {identity['corpus_sha256'][:12]}…, index "
                f"{identity['index_sha256'][:12]}…{_passages(identity)}",
            )
        )
        if config.retrieval.provider == "flashrag":
            searched.findings.append(_canaries(config))
        asking = _Asking(guard, config.execute.deadline_seconds)
        searched.findings.append(await _known(asking, question, passage))
        searched.search_bytes = await _measured(asking, config)
    except errors.SidecarError as exc:
        searched.findings.append(error("search", exc.message))
    finally:
        await provider.close()
    return searched


def _passages(identity: dict[str, object]) -> str:
    count = identity.get("passages")
    return f", {count:,} passages, every file as in its manifest" if isinstance(count, int) else ""


def _canaries(config: Config) -> Finding:
    if config.retrieval.flashrag.canaries is None:
        return warning(
            "canaries",
            "none: nothing checks that the retriever serves the declared corpus and index",
            "`smartsearch-sidecar canaries record QUESTIONS OUT --config F`, then "
            "retrieval.flashrag.canaries",
        )
    return ok("canaries", "the retriever gives every recorded answer")  # opening asked them all


class _Asking:
    def __init__(self, guard: Guard, seconds: float) -> None:
        self._guard = guard
        self._seconds = seconds

    async def ask(self, question: str) -> Found:
        """One search within the deadline of a rollout's."""
        deadline = asyncio.get_running_loop().time() + self._seconds
        try:
            async with asyncio.timeout_at(deadline):
                return await self._guard.search(question, deadline)
        except TimeoutError:
            raise errors.PROVIDER_TRANSPORT(
                f"a search did not end within {self._seconds:g} s (execute.deadline_seconds)"
            ) from None


async def _known(asking: _Asking, question: str | None, passage: str | None) -> Finding:
    if question is not None:
        return _answered(question, (await asking.ask(question)).documents(), passage)
    for stock in MEASURED:
        for document in (await asking.ask(stock)).documents():
            return await _finds_itself(asking, document)
    return error(
        "known question",
        "plain questions find no passage at all: the corpus is empty, or of another language",
        "pass a question that it must answer with --question",
    )


def _answered(question: str, documents: list[dict[str, str]], passage: str | None) -> Finding:
    name = "known question"
    asked = repr(question[:60])
    if not documents:
        return error(name, f"{asked} finds no passage", "is this the corpus the run is to search?")
    if passage is None:
        return ok(name, f"{asked} finds, at rank 1: {documents[0]['contents'][:60]!r}")
    for rank, document in enumerate(documents, 1):
        if passage.casefold() in document["contents"].casefold():
            return ok(name, f"{asked} finds its passage at rank {rank}")
    return error(
        name,
        f"{asked} finds {len(documents)} passages, none with {passage[:60]!r}",
        "is this the corpus the run is to search, and the index of it?",
    )


async def _finds_itself(asking: _Asking, document: dict[str, str]) -> Finding:
    name = "known question"
    words = " ".join(document["contents"].split()[:_WORDS_KEPT])
    found = (await asking.ask(words)).documents()
    for rank, other in enumerate(found, 1):
        if other["id"] == document["id"]:
            return ok(name, f"the first words of a passage find it at rank {rank}")
    return error(
        name,
        f"passage {document['id'][:40]!r} is not found by its own first words",
        "the index is not of this corpus, or the retriever does not search by text: pass a "
        "question with --question",
    )


async def _measured(asking: _Asking, config: Config) -> int:
    """The mean bytes of the records of one search, as the ledger would write them."""
    execute = config.execute
    environment = execute.environment
    if execute.accepted_environment_sha256:
        environment = " " * max(FOREIGN_ENVIRONMENT_BYTES, len(environment))
    sizes = []
    for question in MEASURED:
        found = await asking.ask(question)
        call = f"wikipedia_search(query={question!r}, top_n={TOP_N})"
        number, at = 1_000_000, "2026-01-01T00:00:00.000000Z"
        records = (
            RetrievalRequested(number, NativeCall(environment, call, question)),
            RetrievalAnswered(number, found.documents_json, "shared", 1_000_000),
        )
        lines = [
            encode_line(
                one.kind, number, draft(one).data_json, seq=2 * number, at=at, prev="0" * 64
            )[0]
            for one in records
        ]
        sizes.append(sum(map(len, lines)))
    return sum(sizes) // len(sizes)
