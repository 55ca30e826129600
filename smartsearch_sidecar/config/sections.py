"""Every section and its keys, and before them what a declaration is made of.

A new key is one declaration in its section: type and bounds, unit, default or presets, and below it
its meaning. Run ``make readme`` and its row is in the table. A rule between keys stands in
``model``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr

from smartsearch_sidecar import errors

MIB: Final = 1024 * 1024


class Section(BaseModel):
    """A section: frozen, strict, without unknown keys, and silent about values in errors."""

    # The text below a key is for `make readme`, which reads the source: pydantic's own option would
    # do that at every start, for 60 ms.
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", hide_input_in_errors=True)


# --- ways to declare a key ------------------------------------------------------------------------


@dataclass(frozen=True)
class Preset:
    """A default that depends on the profile. The key can still be set by itself.

    ``many_nodes`` is what ``training`` presets where ``run.nodes`` is above 1; ``None``: the same.
    """

    training: Any
    reference: Any
    many_nodes: Any = None

    def value(self, profile: object, nodes: object) -> Any:
        """The default. An invalid profile or number of nodes presets as ``training`` on one node
        does: validation refuses it with everything else that is wrong.
        """
        if profile == "reference":
            return self.reference
        many = isinstance(nodes, int) and nodes > 1
        return self.many_nodes if many and self.many_nodes is not None else self.training


def preset(training: Any, reference: Any, many_nodes: Any = None) -> Any:
    """A key that the profile presets, and whose type says what is allowed."""
    return _declared(Preset(training, reference, many_nodes))


def hidden(default: Any = ...) -> Any:
    """A secret, or the key that names its file: left out where a configuration is shown."""
    return Field(default, exclude=True)


def whole(default: int | Preset | None, low: int, high: int, unit: str = "") -> Any:
    """A whole number with both bounds and a unit, which is empty for a port or a seed."""
    allowed = f"a whole number from {low} to {high}" + (f" ({unit})" if unit else "")
    return _declared(default, allowed, ge=low, le=high)


def seconds(default: float, high: int) -> Any:
    """A duration: above zero, fractions allowed."""
    return _declared(default, f"a number above 0 and up to {high} (seconds)", gt=0, le=high)


def _declared(default: Any, allowed: str = "", **bounds: float) -> Any:
    extra: dict[str, Any] = {"allowed": allowed}
    if isinstance(default, Preset):
        extra["preset"] = default
        default = default.training
    return Field(default, json_schema_extra=extra, **bounds)  # type: ignore[call-overload]


# --- kinds of value -------------------------------------------------------------------------------
#
# No message made here ever repeats a value: some of the values are secrets.


@dataclass(frozen=True)
class Allowed:
    """Rides in ``Annotated``: the words that complete "use …" in a message and in the key table."""

    words: str


def _fitting(fits: Callable[[Any], bool]) -> AfterValidator:
    def check(value: Any) -> Any:
        if not fits(value.get_secret_value() if isinstance(value, SecretStr) else value):
            raise ValueError  # ``Allowed`` has the words that reach a person
        return value

    return AfterValidator(check)


def _matching(pattern: str) -> AfterValidator:
    return _fitting(lambda text: re.fullmatch(pattern, text) is not None)


def _is_http_url(value: str) -> bool:
    try:
        parts = urlsplit(value)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, a bracket that does not close
        return False
    plain = re.fullmatch(r"[\x21-\x7e]+", value) is not None
    return usable and plain and "@" not in parts.netloc and not parts.query and not parts.fragment


FilePath = Annotated[Path, Allowed("a path")]

Capability = Annotated[
    SecretStr,
    _matching(r"[A-Za-z0-9_-]{32,128}"),
    Allowed("32 to 128 characters of A-Z, a-z, 0-9, _ and -"),
]

NatsServers = Annotated[
    SecretStr,
    _matching(r"(nats|tls)://[\x21-\x2b\x2d-\x7e]+(,(nats|tls)://[\x21-\x2b\x2d-\x7e]+)*"),
    Allowed("nats:// or tls:// addresses, separated by commas"),
]

Sha256 = Annotated[
    str, _matching(r"[0-9a-f]{64}"), Allowed("a sha256: 64 digits of 0-9 and a-f, lower case")
]

Sha256List = Annotated[
    tuple[Sha256, ...],
    _fitting(lambda values: len(set(values)) == len(values)),
    Allowed("a list of different sha256 digests, 64 digits of 0-9 and a-f each"),
]

HttpUrl = Annotated[
    str,
    _fitting(_is_http_url),
    Allowed("an http:// or https:// address without user, password, query or fragment"),
]

Host = Annotated[str, _matching(r"[A-Za-z0-9._:-]{1,253}"), Allowed("an IP address or a host name")]

Name = Annotated[
    str, _matching(r"[A-Za-z0-9_-]{1,64}"), Allowed("1 to 64 characters of A-Z, a-z, 0-9, _ and -")
]

Words = Annotated[
    str, _fitting(lambda value: 0 < len(value) <= 1024), Allowed("1 to 1024 characters")
]

PROVIDERS: Final = ("bm25", "flashrag")
"""Every backend of this package, by the name of its folder in ``retrieval/``."""

ProviderName = Annotated[
    str,
    _matching("|".join((*PROVIDERS, r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"))),
    Allowed(f"{', '.join(PROVIDERS)} or package.module:factory"),
]

Route = Literal["execute", "search", "retrieve"]

Routes = Annotated[
    tuple[Route, ...],
    _fitting(lambda values: 0 < len(values) == len(set(values))),
    Allowed("a list of at least one of execute, search and retrieve, each once"),
]


class RunSection(Section):
    """The run this process serves."""

    directory: FilePath | None = None
    """Where the ledger of this run is written; it must not exist yet. Also `--run-dir`."""
    nodes: int = whole(1, 1, 4096, "trainer nodes")
    """How many sidecars this run has; above 1 each knows some of its answers."""
    previous: FilePath | None = None
    """The run directory this run goes on from: the claim names its head and last receipt."""
    on_unclean_restart: Literal["latch", "report"] = preset("latch", "latch")
    """After a crash: close the latch, or only report it, where enforced provenance finds the
    rollouts that met the outage."""

    def needed_directory(self) -> Path:
        """``directory``, or a ``ConfigError`` that says how to name it."""
        if self.directory is None:
            raise errors.CONFIG_INVALID("run.directory is not set: name it, or pass --run-dir")
        return self.directory


class ServerSection(Section):
    """Where it listens, and the secrets in its URLs."""

    host: Host = "127.0.0.1"
    """The address to listen on. The protocol is plain HTTP: loopback only."""
    port: int = whole(8765, 0, 65535)
    """The port; 0 takes any free one."""
    allow_remote: bool = False
    """Allows a `host` that is not loopback: capabilities then cross a network unencrypted."""
    execute_capability: Capability | None = hidden(None)
    """The secret of `sandbox_url`; made at start when absent."""
    execute_capability_file: FilePath | None = hidden(None)
    """Instead: a file that holds it."""
    internal_capability: Capability | None = hidden(None)
    """The secret of `internal_url`; made at start when absent, never the same one."""
    internal_capability_file: FilePath | None = hidden(None)
    """Instead: a file that holds it."""
    probe_host: Host | None = None
    """The address of a second listener that has `/livez` and `/readyz` alone."""
    probe_port: int | None = whole(None, 0, 65535)
    """Its port; 0 takes any free one. Set both keys or neither."""
    body_seconds: float = seconds(10, 3600)
    """A request body must arrive within this; a stalled one holds a connection."""
    idle_seconds: float = seconds(75, 86400)
    """An idle connection is closed after this; above the clients' own pool time."""
    connections_max: int = whole(4096, 1, 65536, "connections")
    """Open at once, strangers aside; each costs a descriptor and 10 KB."""


class LedgerSection(Section):
    """How the journal is written."""

    segment_mib: int = whole(256, 1, 4096, "MiB")
    """A journal file of this size is followed by another."""
    stall_seconds: int = whole(10, 1, 600, "seconds")
    """A write that the disk has not ended after this time has failed, and the run with it."""
    sync: bool = True
    """Syncs before it answers. Off only for measurements: a power cut then loses answers."""


class ClusterSection(Section):
    """One verdict over many nodes, by NATS JetStream. Needs `run.nodes` of 2 or more."""

    nats_url: NatsServers = hidden()
    """The NATS servers; a secret, as it may hold one."""
    run_id: Name
    """The run's name, the same on every node."""
    node: Name
    """This node's name, different on every node."""
    lease_block: int = whole(256, 1, 1_000_000, "searches")
    """Quota leased at once: a larger block means less traffic, and more lost with a node."""
    lost_seconds: float = seconds(15, 3600)
    """The run ends when a node, or NATS, is silent for this long."""


class ExecuteSection(Section):
    """Searches: `POST /<execute>/execute` and its sister routes."""

    environment: Words = "agentinputlab:smartsearch-fixed-wikipedia-v1"
    """The one `env` text that is served."""
    accepted_environment_sha256: Sha256List = ()
    """Digests of other `env` texts (an unmodified dataset's) that are served as well."""
    max_calls: int = whole(10_000, 1, 1_000_000_000, "searches")
    """The run's quota; one search more closes the latch."""
    slots: int = whole(8, 1, 1024, "searches")
    """Served at once; 8 is the reference's number. The others wait."""
    waiting_max: int = whole(Preset(512, 0), 0, 65536, "requests")
    """The waiting room: ranks x 8 minus the slots, or more; one request more closes the latch."""
    deadline_seconds: float = seconds(9, 3600)
    """Waiting and search together; below the 10 s after which the pinned client leaves."""
    body_bytes_max: int = whole(Preset(262_144, 16_384), 1, 16 * MIB, "bytes")
    """A larger body is refused unread: a dataset's own `env` source and a long query fit."""
    on_invalid_query: Literal["decline", "latch"] = preset("decline", "latch")
    """An invalid query of the policy: answer `invalid query` and record it, or close the latch."""
    on_invalid_call: Literal["latch", "decline"] = "latch"
    """A call of another tool, or with other arguments: close the latch; or answer `invalid call`
    and record it, where the policy writes the whole call (ReCall, rLLM)."""
    on_undelivered: Literal["latch", "record", "replay"] = preset("latch", "latch")
    """A client that left before its answer: its rollout then holds a timeout. `replay` gives the
    answer to the same request within the deadline, and latches without it; `record` never does."""
    routes: Routes = ("execute",)
    """Served under the execute capability; `search` and `retrieve` are for other trainers."""
    retrieve_topk: int = whole(3, 1, 50, "passages")
    """The only `topk` that `/retrieve` serves. rLLM asks for 10."""


class Bm25Section(Section):
    """The embedded BM25 index."""

    index: FilePath | None = None
    """The folder `index build` wrote. Needed by `bm25`."""


class FlashRagSection(Section):
    """A FlashRAG retriever service in front of which the sidecar stands."""

    url: HttpUrl | None = None
    """The retriever's address. Needed by `flashrag`."""
    corpus_sha256: Sha256 | None = None
    """The corpus it serves, as the operator declares it. Needed by `flashrag`."""
    index_sha256: Sha256 | None = None
    """The index it serves, as the operator declares it. Needed by `flashrag`."""
    batch_max: int = whole(32, 1, 1024, "searches")
    """Gathered into one `/batch_search` while another runs; needs as many `execute.slots`."""
    canaries: FilePath | None = None
    """Recorded questions and answers, asked at start and every 60 s to defend the digests."""
    timeout_seconds: float = seconds(8, 3600)
    """One call to it; below the deadline, so that a hang is named as the retriever's."""


class RetrievalSection(Section):
    """The retriever, and how its answers are handled."""

    provider: ProviderName = "bm25"
    """The backend."""
    retries: int = whole(Preset(2, 0), 0, 10, "tries")
    """More tries after a transport fault, or a status of 429, 500, 502, 503 or 504: 0.25 s, 1 s,
    then 2 s apart, within the deadline; asking again costs nothing and gives the same answer."""
    cache_mib: int = whole(Preset(64, 0), 0, 65536, "MiB")
    """Answers kept for repeated searches; 0 also ends the sharing of identical ones in flight."""
    on_protocol_tag: Literal["drop", "latch"] = preset("drop", "latch")
    """A passage with a protocol tag: it would end or forge a turn of the rollout. `drop` leaves it
    out and records it, and so a blank one, or one that comes a second time in an answer."""
    emptied_share_max: float = _declared(
        Preset(0.1, 1.0), "a number from 0 to 1 (share)", ge=0, le=1
    )
    """Answers that lost every passage to a tag: above this share of the last 200 searches that
    repeated no other, and 20 at least, the latch closes. 1.0 never does."""
    on_drift: Literal["latch", "off"] = preset("latch", "off")
    """A remote document whose text differs from the one this run saw under its id before."""
    bm25: Bm25Section = Field(default_factory=Bm25Section)
    flashrag: FlashRagSection = Field(default_factory=FlashRagSection)


class QuotasSection(Section):
    """What one split of the references may cost."""

    max_scores: int = whole(10_000, 0, 1_000_000_000, "scores")
    """Scored rollouts."""
    max_helper_calls: int = whole(100_000, 0, 1_000_000_000, "calls")
    """Calls to the helper; each costs GPU time."""
    max_output_tokens: int = whole(10_000_000, 0, 1_000_000_000_000, "tokens")
    """Tokens the helper writes, 2048 reserved a call."""


class ReferencesSection(Section):
    """Question and answers per split, from the trainer's Parquet or JSONL."""

    train: FilePath | None = None
    """The training split."""
    validation: FilePath | None = None
    """The validation split; no question may be in both."""


class HelperSection(Section):
    """The language model the pinned scorer asks for its verdicts."""

    kind: Literal["sglang", "completions"] = "sglang"
    """SGLang's `/generate`, or an OpenAI-compatible `/v1/completions`."""
    url: HttpUrl | None = None
    """The helper's address. Needed with rewards."""
    model: Words | None = None
    """The name it serves the model under. Needed with rewards."""
    model_sha256: Sha256 | None = None
    """The model, as the operator declares it. Needed with rewards."""
    timeout_seconds: float = seconds(120, 3600)
    """One call: 2048 tokens at a busy helper. A late answer fails the score."""
    concurrency: int = whole(64, 1, 4096, "calls")
    """Sent to the helper at once; a larger number only queues there."""
    retries: int = whole(Preset(2, 0), 0, 10, "tries")
    """More calls where it refuses one before it works (429, 503), after 0.5 s, then 2 s apart,
    within the deadline. Each counts in the quota; a refused one's reservation stays."""
    on_empty: Literal["latch", "score"] = "latch"
    """A completion without text: close the latch; or do as the pinned scorer, which counts its
    round as correct, and record the verdict as `empty` (it adds to `unparsed_share_max`)."""


class RewardSection(QuotasSection):
    """Rewards by the pinned scorer. The three quotas here are the training split's."""

    enabled: bool = False
    """Serves `/reward`; needs scorer, references and helper."""
    checkout: FilePath | None = None
    """The operator's checkout of the pinned trainer: commit, clean tree and scorer checked."""
    source: FilePath | None = None
    """Instead of a checkout: the scorer's one file, pinned by `source_sha256`."""
    source_sha256: Sha256 | None = None
    """The digest of `source`."""
    slots: int = whole(8, 1, 1024, "requests")
    """Scored at once; a batch is one request, whatever its rows."""
    waiting_max: int = whole(64, 0, 65536, "requests")
    """The waiting room; a full one closes the latch."""
    deadline_seconds: float = seconds(600, 86400)
    """Waiting and scoring of one request, all helper calls of a batch included."""
    batch_max: int = whole(64, 1, 4096, "rows")
    """Rows of one batch; all of them stay in memory until it is answered."""
    max_input_bytes: int = whole(16 * MIB, 1, 256 * MIB, "bytes")
    """One rollout's text; far above any context window."""
    seed: int = whole(17, 0, 2**31 - 1)
    """Sent to a helper whose protocol has a seed."""
    # One sidecar of many cannot know what the others answered: it can record, not refuse.
    provenance: Literal["enforce", "record", "off"] = preset("enforce", "off", many_nodes="record")
    """Whether each passage block of a scored rollout must be an answer this run gave."""
    side_by_side: bool = preset(True, False)
    """Sends the helper calls of a row, and of a batch, together."""
    reuse_identical: bool = preset(True, False)
    """Gives a repeated rollout its recorded score: the trainer scores each batch twice."""
    unparsed_share_max: float = _declared(
        Preset(0.2, 1.0), "a number from 0 to 1 (share)", ge=0, le=1
    )
    """Verdicts that are neither 0 nor 1 count as correct upstream: above this share of the last 200
    the latch closes. 1.0 never does."""
    references: ReferencesSection = Field(default_factory=ReferencesSection)
    validation: QuotasSection = Field(default_factory=QuotasSection)
    helper: HelperSection = Field(default_factory=HelperSection)
