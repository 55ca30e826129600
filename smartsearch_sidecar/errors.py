"""Every failure of the package: one row each. Rows are raised, classes are caught.

``raise errors.BUSY("no slot is free")`` makes an exception that carries its row. The message of an
exception is for a person who does not know the code: it names the thing and the remedy, and never
holds a capability or a reference answer. Codes and causes are stable: other people's scripts read
them. A failure has a class of its own only where some code catches it by that class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

Raised = TypeVar("Raised", bound="SidecarError")

GOING_ON: Final = (
    "Stop training, go back to the last accepted checkpoint, and start the sidecar on a new run "
    "directory with run.previous set to this one."
)


@dataclass(frozen=True, slots=True)
class Told:
    """What a caller is told.

    The sentence is constant, so that nothing of a request, a capability or a reference answer can
    reach an answer; the ledger and the log hold the detail.
    """

    code: str
    """``error.code`` on the wire, or the word before a sentence on a terminal."""
    status: int | None = None
    """Of HTTP. ``None``: no request meets it."""
    sentence: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Failure(Generic[Raised]):
    """One row of the table."""

    family: type[Raised]
    """The class its exceptions are caught by."""
    answer: Told
    cause: str | None = None
    """What closes the latch, ``None`` where the failure must not close it."""
    remedy: str = ""
    """What the person on call looks at, before a new run: a closed latch never opens again."""
    as_reward: Failure[Any] | None = None
    """The row under which a reward request meets it: the latch then says whose request it was."""
    says_more: bool = False
    """The message itself is answered instead of the sentence: each one is constant, and only the
    holder of the internal capability reads it."""

    def __call__(self, message: str, **details: Any) -> Raised:
        """The exception to raise. ``details`` are the further words its class takes."""
        return self.family(self, message, **details)

    def matches(self, exc: object) -> bool:
        """Whether ``exc`` was raised from this row."""
        return isinstance(exc, SidecarError) and exc.failure is self

    @property
    def closes_as(self) -> str:
        """The cause it closes the latch with where it has to close it: ``cause``, else ``code``."""
        return self.cause or self.answer.code


# --- the classes: what some code catches ----------------------------------------------------------


class SidecarError(Exception):
    """Base of every failure that this package names. ``failure`` is its row."""

    def __init__(self, failure: Failure[Any], message: str) -> None:
        # Both are `args`: an exception is copied by calling its class with them.
        super().__init__(failure, message)
        self.failure: Final = failure
        self.message: Final = message

    def __str__(self) -> str:
        return self.message

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.message!r})"

    @property
    def code(self) -> str:
        return self.failure.answer.code

    @property
    def cause(self) -> str | None:
        return self.failure.cause

    @property
    def closes_as(self) -> str:
        return self.failure.closes_as


class UsageError(SidecarError):
    """The words, files or places that a person gave cannot be used: a command ends with exit 2."""


class ConfigError(UsageError):
    """A configuration key is unknown, missing or has a value that is not allowed."""


class Unreachable(UsageError):
    """No sidecar answers at the address."""


class ScorerSourceError(UsageError):
    """The scorer's source is missing, not the pinned one, or its checkout cannot be trusted."""


class ClusterRefused(UsageError):
    """This node may not join the run: its name is taken, the run is full, or it differs."""


class EdgeRefusal(SidecarError):
    """Bytes that are refused before they are read as a request."""


class Unauthorized(EdgeRefusal):
    """No capability, or a wrong one; the run is not touched."""


class InvalidRequest(SidecarError):
    """The body is not what the contract of its route asks for."""


class RetrievalError(SidecarError):
    """What a search found cannot be answered with."""


class ProviderFault(RetrievalError):
    """The provider raised, crashed, or answered something that is no answer."""


class ProviderTransport(ProviderFault):
    """The provider was not reached, the exchange broke, or it said that it cannot answer just now:
    only this kind may be retried.
    """


class LedgerFailed(SidecarError):
    """A record could not be made durable. It is never tried again: the run is over."""


class LedgerCorrupt(SidecarError):
    """A journal is not a history that this package wrote; no file is touched."""


class InvariantBroken(SidecarError):
    """What this package promises itself does not hold; ``assert`` would vanish under ``-O``."""


class ScorerFailed(SidecarError):
    """The pinned scorer raised, or returned something that is not a number."""


class ProvenanceBroken(SidecarError):
    """A result block stands where only the rollout writes, and is no answer of this run."""


class HelperFault(SidecarError):
    """The reward helper gave no usable, measured verdict.

    ``usage`` is ``(input_tokens, output_tokens)`` where the failed exchange was measured all the
    same: a wrong, empty or over-long answer was paid for. ``None``: the cost is not known.
    ``refused``: it said that it would not begin, so the same may be asked again.
    """

    def __init__(
        self,
        failure: Failure[Any],
        message: str,
        *,
        usage: tuple[int, int] | None = None,
        refused: bool = False,
    ) -> None:
        super().__init__(failure, message)
        self.usage: Final = usage
        self.refused: Final = refused


class HelperUnreachable(HelperFault):
    """No connection to the helper was established: only this fault may be tried again."""


class HelperIdentity(HelperFault):
    """The helper serves another model than the one declared."""


class ClusterUnreachable(SidecarError):
    """The servers between the nodes did not answer in time: the other nodes' state is unknown."""


class ClusterUnreadable(SidecarError):
    """A value of another node is not one that this version of the package writes."""


# --- what a caller is told by several rows --------------------------------------------------------

_INVALID_BODY = Told(
    "invalid_body", 400, "Send the body whole, in time, with exactly one Content-Length."
)
_BODY_SIZE = Told("body_size", 413, "The body is empty or over the limit (execute.body_bytes_max).")
_CONTENT_TYPE = Told("content_type", 415, "Send the body as application/json.")
_INVALID_REQUEST = Told("invalid_request", 400, "The body is not a request of this route.")
_BUSY = Told("busy", 429, "Every slot is taken and the request could not wait any longer.")
_UNAUTHORIZED = Told(
    "unauthorized", 401, "No such path: the first segment must be the run's capability."
)
_METHOD_NOT_ALLOWED = Told("method_not_allowed", 405, "This route does not take this method.")
_NOT_FOUND = Told("not_found", 404, "This capability serves no such route.")
_RETRIEVAL_FAILED = Told(
    "retrieval_failed",
    502,
    "The run has failed and answers nothing more; ask /health for the cause.",
)
_RESPONSE_UNDELIVERED = Told("response_undelivered", 502, "The client had left.")

_PROVIDER: Final = (
    "The retrieval provider failed: look at its own log, and try it with `smartsearch-sidecar "
    "doctor`."
)


def _closes(family: type[Raised], answer: Told, remedy: str) -> Failure[Raised]:
    """A row that closes the latch under its own code."""
    return Failure(family, answer, answer.code, remedy)


def _ends(answer: Told, remedy: str) -> Failure[SidecarError]:
    """The same for a row that no code catches by a class of its own."""
    return _closes(SidecarError, answer, remedy)


def _both(
    family: type[Raised], answer: Told, remedy: str, reward_remedy: str
) -> tuple[Failure[Raised], Failure[Raised]]:
    """Two rows: a search closes the latch under ``http_`` and the code, a reward request under
    ``reward_http_`` and the code.
    """
    reward = Failure(family, answer, f"reward_http_{answer.code}", reward_remedy)
    return Failure(family, answer, f"http_{answer.code}", remedy, reward), reward


def _no_score(code: str) -> Told:
    """A reward request gets no score."""
    return Told(code, 502, "No reward was given and the run is over; ask /health for the cause.")


def _helper(code: str, fault: str) -> Failure[HelperFault]:
    """A row of a helper whose own log says more."""
    return _closes(HelperFault, _no_score(code), f"Look at the helper's own log: {fault}")


_REWARD_FAILED = _no_score("reward_failed")

# --- misuse: found before a run begins, or by a command; exit 2 -----------------------------------

USAGE = Failure(UsageError, Told("usage"))
CONFIG_INVALID = Failure(ConfigError, Told("config_invalid"))
# The run directory exists, is served by another process, or cannot be made.
RUN_DIRECTORY = Failure(UsageError, Told("run_directory"))
# A corpus cannot be read; the message names file and line.
CORPUS_INVALID = Failure(UsageError, Told("corpus_invalid"))
# An index is missing, incomplete, of another version, or differs from its manifest.
INDEX_UNUSABLE = Failure(UsageError, Told("index_unusable"))
UNREACHABLE = Failure(Unreachable, Told("unreachable"))
# Memory, or room for threads, does not suffice to serve; the message names the limit.
MEMORY_LIMITED = Failure(UsageError, Told("memory_limited"))
# The configuration asks for something that this installation does not carry (an extra).
NOT_AVAILABLE = Failure(UsageError, Told("not_available"))
SCORER_SOURCE = Failure(ScorerSourceError, Told("scorer_source"))
# A file of references cannot be used; the message names file and row.
REFERENCES_INVALID = Failure(UsageError, Told("references_invalid"))
CLUSTER_REFUSED = Failure(ClusterRefused, Told("cluster_refused"))

# --- the edge: bytes that are no request of ours --------------------------------------------------

_CLIENT = (
    "Something sent /execute a request the pinned rollout does not send: compare sandbox_url and "
    "the rollout's code with the pinned ones"
)

UNAUTHORIZED = Failure(Unauthorized, _UNAUTHORIZED)
# A capability in another place or spelling than is served, or sent to another listener.
MISDIRECTED = Failure(
    EdgeRefusal,
    _UNAUTHORIZED,
    "http_unauthorized",
    f"{_CLIENT}; it held the capability in another place or spelling, or used the wrong port.",
)
# The execute capability with a path that is not served.
NOT_FOUND = Failure(
    EdgeRefusal,
    _NOT_FOUND,
    "http_not_found",
    f"{_CLIENT}; its path was another, or sandbox_url is the internal URL.",
)
METHOD_NOT_ALLOWED = Failure(EdgeRefusal, _METHOD_NOT_ALLOWED)
ROLLOUT_METHOD = Failure(
    EdgeRefusal,
    _METHOD_NOT_ALLOWED,
    "http_method_not_allowed",
    f"{_CLIENT}; its method was another, or sandbox_url is the internal URL.",
)
# The body's length is not declared exactly once, or the body came late or short.
INVALID_BODY, REWARD_INVALID_BODY = _both(
    EdgeRefusal,
    _INVALID_BODY,
    f"{_CLIENT}; its body was late, short or of no declared length.",
    "A reward request arrived late, short or of no declared length.",
)
BODY_SIZE, REWARD_BODY_SIZE = _both(
    EdgeRefusal,
    _BODY_SIZE,
    f"{_CLIENT}, or raise execute.body_bytes_max.",
    "A reward request is too large: send fewer rows a batch.",
)
CONTENT_TYPE, REWARD_CONTENT_TYPE = _both(
    EdgeRefusal,
    _CONTENT_TYPE,
    f"{_CLIENT}; its body was not declared as JSON.",
    "A reward request was not declared as JSON.",
)
BAD_MESSAGE = Failure(
    EdgeRefusal,
    Told("bad_message", 400, "This is not an HTTP/1.1 request this server can read."),
    "http_bad_message",
    f"{_CLIENT}, and look for a proxy in between (NO_PROXY=127.0.0.1).",
)

# --- the operator: an internal request that cannot be served; the latch stays open ----------------

OPERATOR_REQUEST = Failure(
    SidecarError,
    Told(
        "operator_request", 400, "A parameter or the body of this internal request is not allowed."
    ),
    says_more=True,
)
# The internal capability with a path that is not served.
NO_SUCH_PAGE = Failure(SidecarError, _NOT_FOUND, says_more=True)
TOO_MANY_VIEWERS = Failure(
    SidecarError, Told("too_many_viewers", 503, "Too many pages follow this run; close one.")
)
NOT_READY = Failure(SidecarError, Told("not_ready", 503, "The index is still loading."))

# --- the contract: a request that says something we do not serve ----------------------------------

# Not strict JSON, or text that has no UTF-8 form.
INVALID_JSON, REWARD_INVALID_JSON = _both(
    InvalidRequest,
    _INVALID_REQUEST,
    f"{_CLIENT}; its body was not strict JSON.",
    "A reward request was not strict JSON.",
)
# JSON of another shape, another environment, another call.
INVALID_NATIVE_REQUEST = Failure(
    InvalidRequest,
    _INVALID_REQUEST,
    "invalid_native_request",
    f"{_CLIENT}; env or call differ (execute.environment).",
)
# JSON of another shape on a route of another trainer's client.
INVALID_SEARCH_REQUEST = Failure(
    InvalidRequest,
    _INVALID_REQUEST,
    "invalid_search_request",
    "A search request is not of the documented shape: compare its client with the route's form.",
)
INVALID_REWARD_REQUEST = Failure(
    InvalidRequest,
    _INVALID_REQUEST,
    "invalid_reward_request",
    "A reward request is not of the documented shape: compare the trainer's integration file "
    "with this version's.",
)
# A protocol tag in a query, with `on_invalid_query = "latch"`: an attempt that failed.
QUERY_TAGGED = _ends(_RETRIEVAL_FAILED, _PROVIDER)

# --- the client: it was gone before its answer was handed over ------------------------------------

# Whether this closes the latch, `execute.on_undelivered` says.
CLIENT_GONE = Failure(SidecarError, _RESPONSE_UNDELIVERED)
RESPONSE_UNDELIVERED = _ends(
    _RESPONSE_UNDELIVERED,
    "A rollout gave up before its answer: see whether searches or the disk are slow (the charts "
    "below), and whether a rollout process was killed.",
)

# --- overload and the run's own limits ------------------------------------------------------------

BUSY, REWARD_BUSY = _both(
    SidecarError,
    _BUSY,
    "More calls came at once than there is room for: raise execute.slots, execute.waiting_max or "
    "server.connections_max, or see why searches are slow.",
    "More reward requests came at once than there is room for: raise reward.slots or "
    "reward.waiting_max, or see why the helper is slow.",
)
OUT_OF_DESCRIPTORS = _ends(
    Told("out_of_descriptors"),
    "The process had no file descriptor left, so connections were dropped unseen: raise ulimit -n, "
    "or see what else of this machine holds descriptors.",
)
QUOTA_EXHAUSTED = _ends(
    Told("quota_exhausted", 429, "The run's quota is used up."),
    "The run has used what it was allowed: raise the quota named in the detail for the next run, "
    "after asking whether so much use was meant.",
)
REWARD_LATCHED = Failure(SidecarError, _REWARD_FAILED)
# The run has failed before; no request is admitted.
LATCH_CLOSED = Failure(SidecarError, _RETRIEVAL_FAILED, as_reward=REWARD_LATCHED)

# --- the provider: what a search met --------------------------------------------------------------

PROVIDER_FAULT = _closes(ProviderFault, _RETRIEVAL_FAILED, _PROVIDER)
PROVIDER_TRANSPORT = _closes(ProviderTransport, _RETRIEVAL_FAILED, _PROVIDER)
# Corpus or index are not the ones the run was claimed with.
IDENTITY_CHANGED = Failure(
    RetrievalError,
    _RETRIEVAL_FAILED,
    "identity_changed",
    "Corpus or index changed under the run: put the claimed ones back, and let nothing rebuild "
    "or replace them while a run is served.",
)
DOCUMENT_INVALID = Failure(
    RetrievalError,
    _RETRIEVAL_FAILED,
    "document_invalid",
    "The provider answered documents no rollout may see: repair its corpus.",
)
DOCUMENT_DRIFT = Failure(
    RetrievalError,
    _RETRIEVAL_FAILED,
    "document_drift",
    "A document has other contents than earlier in this run: the retriever's corpus was changed, "
    "or several retrievers with different ones answer in turn.",
)
ANSWERS_EMPTIED = Failure(
    RetrievalError,
    _RETRIEVAL_FAILED,
    "answers_emptied",
    "Too many answers lost every passage to a protocol tag, so rollouts got nothing: look at them "
    "with `ledger show --kind retrieval.answered`, and take the tags out of the corpus or raise "
    "retrieval.emptied_share_max.",
)
DEADLINE_PASSED = _ends(
    Told("deadline", 504, "The search was still running at its deadline."),
    "A search took too long: see whether the retriever or this machine is overloaded; "
    "execute.deadline_seconds must stay under the rollout's own 10 seconds.",
)
REQUEST_CANCELLED = Failure(
    SidecarError,
    _RETRIEVAL_FAILED,
    "request_cancelled",
    "The sidecar was stopped while it searched: stop the trainer first.",
)

# --- the ledger, restarts, the operator, and a broken promise of our own --------------------------

LEDGER_FAILED = _closes(
    LedgerFailed,
    Told(
        "ledger_failed", 503, "The ledger cannot record; nothing is answered that is not recorded."
    ),
    "The disk took no more: free space or mount it writable, and look at the kernel's log for "
    "I/O errors.",
)
LEDGER_LOST = _closes(
    LedgerFailed,
    Told("ledger_lost", 503, "The run's files are no longer those that this process writes."),
    "A file of the run directory was removed, replaced or changed while it was served: find out "
    "what cleans up or copies there, and keep what is left.",
)
LEDGER_STALLED = _closes(
    LedgerFailed,
    Told("ledger_stalled", 503, "The disk stood still for longer than ledger.stall_seconds."),
    "The disk did not end a write in ledger.stall_seconds: look at the kernel's log and at what "
    "else uses the disk.",
)
LEDGER_CORRUPT = Failure(LedgerCorrupt, Told("ledger_corrupt"))
UNRESOLVED_AFTER_RESTART = _ends(
    Told("unresolved_after_restart"),
    "The process died with work in flight: find out why (memory, a signal, the node), because "
    "rollouts met that outage as text.",
)
UNCLEAN_RESTART = _ends(
    Told("unclean_restart"),
    "The process died and came back: rollouts that asked meanwhile met an error as text. Find "
    "out why it died.",
)
UNJUDGED_RESTART = _ends(
    Told("unjudged_restart"),
    "The run was stopped in order and went on, and a trainer may have asked meanwhile: its "
    "rollouts then hold an error as text. Stop the trainer before its sidecar and say so "
    "(`serve --resume --trainer-stopped`), or let reward.provenance enforce what is trained on.",
)
# Both by `POST /latch`: a person's word, and that of a file of `integrations/`.
OPERATOR = _ends(Told("operator"), "Somebody closed this run by hand: the reason is in the detail.")
TRAINER_REPORTED = _ends(
    Told("trainer_reported"),
    "The trainer's own process met a failure that the sidecar could not see: the detail says which "
    "file of integrations/ it met, and what.",
)
INTERNAL_ERROR = _closes(
    InvariantBroken,
    Told("internal_error", 500, "The sidecar broke a promise of its own; the run is over."),
    "The sidecar broke a promise of its own: keep the run directory and the log, and report both.",
)

# --- rewards: why a score was refused or failed ---------------------------------------------------

# Each one closes the latch under its own name: the pinned trainer swallows an exception and scores
# the batch again, so a refusal that only raised would be trained over.

REWARD_FAILED = _ends(_REWARD_FAILED, "No reward could be given: the detail names the step.")
REWARD_CANCELLED = Failure(
    SidecarError,
    _REWARD_FAILED,
    "reward_cancelled",
    "The sidecar was stopped while it scored: stop the trainer first.",
)
REWARD_DEADLINE = Failure(
    SidecarError,
    _REWARD_FAILED,
    "reward_deadline",
    "A batch took longer than reward.deadline_seconds: see whether the helper is slow, or send "
    "fewer rows.",
)
REFERENCE_MISMATCH = _ends(
    Told(
        "reference_mismatch", 409, "Question and answers are not those of the declared references."
    ),
    "A rollout's question or answers are not in reward.references: point it at the files the "
    "trainer reads.",
)
NO_USER_TURN = _ends(
    Told("no_user_turn", 409, "The text has no user turn: keep special tokens when decoding."),
    "Special tokens were lost: decode rollouts with skip_special_tokens=False.",
)
TEMPLATE_DIFFERS = _ends(
    Told(
        "template_differs",
        409,
        "The scorer cannot read the text: chat template or decoding differ.",
    ),
    "The scorer cannot read the rollout: chat template or decoding differ from the pinned "
    "trainer's.",
)
SOLUTION_TOO_LONG = _ends(
    Told("solution_too_long", 413, "The rollout is over reward.max_input_bytes."),
    "A rollout is over reward.max_input_bytes: raise it, or see why it is so long.",
)
SOURCE_CHANGED = _ends(
    _no_score("source_changed"),
    "The scorer's source changed on disk while the run was served: put the verified one back.",
)
REFERENCES_CHANGED = _ends(
    _no_score("references_changed"),
    "The files of reward.references changed on disk while the run was served: put the claimed ones "
    "back, and find out what the trainer has read.",
)
SCORER_FAILED = _closes(
    ScorerFailed,
    _no_score("scorer_failed"),
    "The pinned scorer raised: the detail names where; compare checkout and data.",
)
NONFINITE_REWARD = _ends(
    _no_score("nonfinite_reward"),
    "The scorer gave no finite number: keep the rollout named in the journal.",
)
PROMPTS_DIFFER = _ends(
    _no_score("prompts_differ"),
    "The scorer asked other prompts in its second pass: it is not the pinned one, or not "
    "deterministic; set reward.side_by_side = false.",
)
PROVENANCE_BROKEN = _closes(
    ProvenanceBroken,
    Told(
        "provenance_broken",
        409,
        "A result block is no answer of this run; ask /health for the cause.",
    ),
    "A rollout holds a result this run never gave: it met an error on the way. Look for a proxy, "
    "a timeout or a restart, and set NO_PROXY=127.0.0.1.",
)
NOTHING_JUDGED = _ends(
    _no_score("nothing_judged"),
    "Rollouts were rewarded that searched here, and not one result block could be judged: they do "
    "not hold results as the pinned rollout writes them. Compare the trainer's rollout with "
    "docs/wiring.md.",
)
VERDICTS_UNPARSED = _ends(
    _no_score("verdicts_unparsed"),
    "The helper writes neither 0 nor 1 too often, and each such verdict counts as correct: look "
    "at its answers with `ledger show`, and at its model and template.",
)

# --- the helper: why a call gave no usable verdict ------------------------------------------------

HELPER_FAILED = _helper("helper_failed", "it did not answer as its protocol says.")
HELPER_UNREACHABLE = _closes(
    HelperUnreachable,
    _no_score("helper_unreachable"),
    "Look at the helper's own log: nothing takes connections at reward.helper.url.",
)
# The exchange broke after something had been sent.
HELPER_TRANSPORT = _helper("helper_transport", "the connection broke.")
HELPER_TRUNCATED = _helper("helper_truncated", "it broke off in the middle of an answer.")
HELPER_TIMEOUT = _helper("helper_timeout", "it was slower than reward.helper.timeout_seconds.")
HELPER_STATUS = _helper("helper_status", "it answered with an error status.")
# A redirect is never followed: the prompt holds reference answers.
HELPER_REDIRECT = _closes(
    HelperFault,
    _no_score("helper_redirect"),
    "The helper's address redirects: put the final one into reward.helper.url.",
)
HELPER_ANSWER_INVALID = _helper(
    "helper_answer_invalid", "its answer is not of the protocol's shape."
)
HELPER_NOT_JSON = _closes(
    HelperFault,
    _no_score("helper_not_json"),
    "What answers at reward.helper.url is no helper: a proxy or a login page.",
)
HELPER_EMPTY = _helper("helper_empty", "an empty text would have counted as a correct round.")
HELPER_USAGE_MISSING = _helper(
    "helper_usage_missing", "it must say how many tokens it read and wrote."
)
HELPER_FINISH_REASON = _helper(
    "helper_finish_reason", "it stopped for a reason other than stop or length."
)
HELPER_IDENTITY = _closes(
    HelperIdentity,
    _no_score("helper_identity"),
    "The helper serves another model than reward.helper declares: put the declared one back.",
)
HELPER_OVERLONG = _helper("helper_overlong", "it ignored the limit of tokens it was given.")
# Recorded but not sent, because another call of its batch had failed: it costs nothing.
HELPER_NOT_SENT = _helper("helper_not_sent", "another call of the same batch failed first.")

# --- many nodes -----------------------------------------------------------------------------------

CLUSTER_UNREACHABLE = _closes(
    ClusterUnreachable,
    Told("cluster_unreachable", 503, "The servers between the run's nodes are not reached."),
    "The NATS servers were away for longer than cluster.lost_seconds, or a request could not "
    "wait for them: look at their logs and at the network to cluster.nats_url.",
)
CLUSTER_UNREADABLE = _closes(
    ClusterUnreadable,
    Told("cluster_unreadable", 503, "The run's nodes do not understand each other; ask /health."),
    "Something else wrote to this run's keys: use one version on every node, and a "
    "cluster.run_id that no other run has.",
)
NODE_LOST = _ends(
    Told("node_lost", 503, "A node of the run is lost; ask /health for the cause."),
    "The node named in the detail was silent for cluster.lost_seconds, or never joined: look at "
    "its machine, its sidecar's log and its way to the NATS servers.",
)


# --- the table, read ------------------------------------------------------------------------------

TABLE: Final[dict[str, Failure[Any]]] = {
    name: row for name, row in list(globals().items()) if isinstance(row, Failure)
}
_REMEDIES: Final = {row.cause: row.remedy for row in TABLE.values() if row.cause is not None}


def remedy(cause: str) -> str:
    """What the person on call looks at for a latch cause."""
    return _REMEDIES.get(cause, "The detail names what happened; the journal and the log say more.")
