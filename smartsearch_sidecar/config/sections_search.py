"""``[execute]`` and ``[retrieval]``: what a search may ask, take and answer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from smartsearch_sidecar.config.keys import MIB, Section, key, seconds, whole
from smartsearch_sidecar.config.profiles import preset
from smartsearch_sidecar.config.values import (
    FilePath,
    HttpUrl,
    ProviderName,
    Routes,
    Sha256,
    Sha256List,
    Words,
)


class Execute(Section):
    """Searches: `POST /<execute>/execute` and its sister routes."""

    environment: Words = key(
        "agentinputlab:smartsearch-fixed-wikipedia-v1", "The one `env` text that is served."
    )
    accepted_environment_sha256: Sha256List = key(
        (), "Digests of other `env` texts (an unmodified dataset's) that are served as well."
    )
    max_calls: int = whole(
        10_000, 1, 1_000_000_000, "searches", "The run's allowance; the next one closes the latch."
    )
    slots: int = whole(
        8, 1, 1024, "searches", "In service at once. The reference's number; the rest wait."
    )
    waiting_max: int = whole(
        preset("execute.waiting_max"),
        0,
        65536,
        "requests",
        "The waiting room: at least ranks x 8 minus the slots, or a full house closes the latch.",
    )
    deadline_seconds: float = seconds(
        9, 3600, "Waiting and search together; below the 10 s after which the pinned client leaves."
    )
    body_bytes_max: int = whole(
        preset("execute.body_bytes_max"),
        1,
        16 * MIB,
        "bytes",
        "A larger body is refused unread: a dataset's own `env` source and a long query fit.",
    )
    on_invalid_query: Literal["decline", "latch"] = key(
        preset("execute.on_invalid_query"),
        "A query the policy got wrong: answered `invalid query` and recorded, or the run's end.",
    )
    on_undelivered: Literal["latch", "record"] = key(
        preset("execute.on_undelivered"),
        "A client that left before its answer: its rollout holds an error nobody else can see.",
    )
    routes: Routes = key(
        ("execute",), "What is served under the execute capability; the others suit other trainers."
    )
    retrieve_topk: int = whole(
        3,
        1,
        50,
        "passages",
        "The `topk` that `/retrieve` clients must ask for; no other is served. rLLM's is 10.",
    )


class Bm25(Section):
    """The embedded BM25 index."""

    index: FilePath | None = key(None, "The folder `index build` wrote. Needed by `bm25`.")


class FlashRag(Section):
    """A FlashRAG retriever service in front of which the sidecar stands."""

    url: HttpUrl | None = key(None, "The retriever's address. Needed by `flashrag`.")
    corpus_sha256: Sha256 | None = key(
        None, "The corpus it serves, as the operator declares it. Needed by `flashrag`."
    )
    index_sha256: Sha256 | None = key(
        None, "The index it serves, as the operator declares it. Needed by `flashrag`."
    )
    batch_max: int = whole(
        32,
        1,
        1024,
        "searches",
        "Gathered into one `/batch_search` while another is out; as many `execute.slots` fill it.",
    )
    canaries: FilePath | None = key(
        None, "Recorded questions and answers, asked at start and every 60 s to defend the digests."
    )
    timeout_seconds: float = seconds(
        8, 3600, "One call to it; below the deadline, so that a hang is named as the retriever's."
    )


class Retrieval(Section):
    """Who searches, and what is done with what comes back."""

    provider: ProviderName = key("bm25", "The backend.")
    retries: int = whole(
        preset("retrieval.retries"),
        0,
        10,
        "tries",
        "More tries after a transport fault, 0.25 s, 1 s, then 2 s apart, within the deadline; a "
        "search costs nothing and is frozen.",
    )
    cache_mib: int = whole(
        preset("retrieval.cache_mib"),
        0,
        65536,
        "MiB",
        "Answers kept for repeats; 0 also ends the sharing of identical searches in flight.",
    )
    on_protocol_tag: Literal["drop", "latch"] = key(
        preset("retrieval.on_protocol_tag"),
        "A passage that holds a protocol tag would end or forge a rollout's turn.",
    )
    on_drift: Literal["latch", "off"] = key(
        preset("retrieval.on_drift"),
        "A remote document whose text differs from what this run saw under its id before.",
    )
    bm25: Bm25 = Field(default_factory=Bm25)
    flashrag: FlashRag = Field(default_factory=FlashRag)
