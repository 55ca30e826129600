"""Every exception of the package, named by the boundary it crossed.

Two vocabularies, both stable, both read by other people's scripts:

- ``code`` is what a caller is told (``error.code`` on the wire, or the word before a sentence on a
  terminal). The one table from code to HTTP status is in ``web/routes.py``, not here.
- ``cause`` is what closes the latch, and ``None`` where the failure must not close it.

The message is written for a person who has never seen the code: it names the thing and the
remedy, and never holds a capability or a reference answer.
"""

from __future__ import annotations

from typing import ClassVar


class SidecarError(Exception):
    """Base of every failure this package names.

    ``code`` and ``cause`` are class attributes; an instance may narrow ``cause`` where one boundary
    has several (``InvalidRequest``).
    """

    code: ClassVar[str] = "internal_error"
    cause: str | None = None
    counted: bool = False
    """Set once a refusal was counted: it may pass through several hands on its way out."""

    @property
    def message(self) -> str:
        """The sentence for a person."""
        return str(self.args[0]) if self.args else self.code


# --- misuse: somebody ran us wrongly; a command ends with exit 2 ----------------------------------


class UsageError(SidecarError):
    """The words, files or places a person gave cannot be used; exit code 2."""

    code: ClassVar[str] = "usage"


class ConfigError(UsageError):
    """A configuration key is unknown, missing or has a value that is not allowed."""

    code: ClassVar[str] = "config_invalid"


class RunDirectoryError(UsageError):
    """The run directory exists, is served by another process, or cannot be made."""

    code: ClassVar[str] = "run_directory"


class CorpusError(UsageError):
    """A corpus cannot be read; the message names file and line."""

    code: ClassVar[str] = "corpus_invalid"


class IndexUnusable(UsageError):
    """An index is missing, incomplete, of another version, or differs from its manifest."""

    code: ClassVar[str] = "index_unusable"


class Unreachable(UsageError):
    """No sidecar answers at the address; exit code 2."""

    code: ClassVar[str] = "unreachable"


class NotAvailable(UsageError):
    """The configuration asks for something this installation does not carry (an extra)."""

    code: ClassVar[str] = "not_available"


# --- the edge: bytes that are not a request of ours -----------------------------------------------


class EdgeRefusal(SidecarError):
    """What arrived was refused before it was read as a request."""


class Unauthorized(EdgeRefusal):
    """No capability, or a wrong one; touches nothing."""

    code: ClassVar[str] = "unauthorized"


class NotFound(EdgeRefusal):
    """The right capability with a path that is not served."""

    code: ClassVar[str] = "not_found"
    cause = "http_not_found"


class MethodNotAllowed(EdgeRefusal):
    """The route exists, the method does not."""

    code: ClassVar[str] = "method_not_allowed"


class InvalidBody(EdgeRefusal):
    """The body's length is not declared exactly once, or the body came late or short."""

    code: ClassVar[str] = "invalid_body"
    cause = "http_invalid_body"


class BodySize(EdgeRefusal):
    """An empty body, or one over the bound."""

    code: ClassVar[str] = "body_size"
    cause = "http_body_size"


class ContentType(EdgeRefusal):
    """The media type is not ``application/json``."""

    code: ClassVar[str] = "content_type"
    cause = "http_content_type"


class BadMessage(EdgeRefusal):
    """The bytes are not HTTP that the parser takes."""

    code: ClassVar[str] = "bad_message"
    cause = "http_bad_message"


# --- the operator: an internal request that cannot be served; never closes the latch --------------


class OperatorRequest(SidecarError):
    """An internal request with a parameter or body that is not allowed.

    Its message is answered as it is: a constant sentence, nothing of the request.
    """

    code: ClassVar[str] = "operator_request"


class NoSuchPage(SidecarError):
    """The internal capability with a path that is not served. Its message is answered as it is."""

    code: ClassVar[str] = "not_found"


class TooManyViewers(SidecarError):
    """As many of the operator's pages follow the run as may; the run is not touched."""

    code: ClassVar[str] = "too_many_viewers"


class NotReady(SidecarError):
    """The provider is still loading."""

    code: ClassVar[str] = "not_ready"


# --- the contract: a request that says something we do not serve ----------------------------------


class InvalidRequest(SidecarError):
    """The body is not what the contract asks for.

    ``cause`` is ``http_invalid_request`` (not strict JSON, or text that has no UTF-8 form) or
    ``invalid_native_request`` (JSON of another shape, another environment, another call).
    """

    code: ClassVar[str] = "invalid_request"

    def __init__(self, message: str, *, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class QueryRefused(SidecarError):
    """A query the policy got wrong, in the reference's way: ``on_invalid_query = "latch"``."""

    code: ClassVar[str] = "invalid_request"

    def __init__(self, message: str, *, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class TaggedQuery(SidecarError):
    """A protocol tag in a query, with ``on_invalid_query = "latch"``: an attempt that failed."""

    code: ClassVar[str] = "retrieval_failed"
    cause = "retrieval_failed"


# --- the client: it was gone before its answer was handed over ------------------------------------


class ClientGone(SidecarError):
    """Nobody is there to take the answer; whether that closes the latch is ``on_undelivered``'s."""

    code: ClassVar[str] = "response_undelivered"


# --- overload and the run's own limits ------------------------------------------------------------


class Busy(SidecarError):
    """No slot, a full waiting room, or the deadline passed while waiting."""

    code: ClassVar[str] = "busy"
    cause = "http_busy"


class QuotaExhausted(SidecarError):
    """The run's allowance is used up."""

    code: ClassVar[str] = "quota_exhausted"
    cause = "quota_exhausted"


class LatchClosed(SidecarError):
    """The run has failed before; nothing is admitted any more."""

    code: ClassVar[str] = "retrieval_failed"


# --- the provider: what a search did to us --------------------------------------------------------


class RetrievalError(SidecarError):
    """A search that cannot be answered from."""

    code: ClassVar[str] = "retrieval_failed"
    cause = "retrieval_failed"


class ProviderFault(RetrievalError):
    """The provider raised, crashed, or answered something that is not an answer."""


class ProviderTransport(ProviderFault):
    """The provider was not reached, or the exchange broke: the only kind that may be retried."""


class IdentityChanged(RetrievalError):
    """Corpus or index are not the ones the run was claimed with."""

    cause = "identity_changed"


class DocumentInvalid(RetrievalError):
    """A document breaks the contract of a passage."""

    cause = "document_invalid"


class DocumentDrift(RetrievalError):
    """A document id came back with contents that differ from what this run saw before."""

    cause = "document_drift"


class DeadlinePassed(SidecarError):
    """The deadline passed while the search was still running."""

    code: ClassVar[str] = "deadline"
    cause = "deadline"


class RequestCancelled(SidecarError):
    """An admitted search was cancelled (the daemon was told to stop before it could finish)."""

    code: ClassVar[str] = "retrieval_failed"
    cause = "request_cancelled"


# --- the ledger -----------------------------------------------------------------------------------


class LedgerFailed(SidecarError):
    """A record could not be made durable. Never tried again: the run is over."""

    code: ClassVar[str] = "ledger_failed"
    cause = "ledger_failed"


class LedgerCorrupt(SidecarError):
    """A journal is not a history this package wrote; nothing is touched."""

    code: ClassVar[str] = "ledger_corrupt"


# --- a broken invariant of our own ----------------------------------------------------------------


class InvariantBroken(SidecarError):
    """What this package promises itself does not hold; ``assert`` would vanish under ``-O``."""

    code: ClassVar[str] = "internal_error"
    cause = "internal_error"


# --- reward: why a score was refused or failed ----------------------------------------------------
#
# Two of these are misuse (found before the first request); all others are met while a run is live,
# and each closes the latch under its own name: the pinned trainer swallows an exception and scores
# the batch again, so a refusal that only raised would be trained over.


class ScorerSourceError(UsageError):
    """The scorer's source is missing, not the pinned one, or its checkout cannot be trusted."""

    code: ClassVar[str] = "scorer_source"


class ReferencesError(UsageError):
    """A file of references cannot be used; the message names file and row."""

    code: ClassVar[str] = "references_invalid"


class RewardError(SidecarError):
    """A rollout that was not given a reward."""

    code: ClassVar[str] = "reward_failed"
    cause: str | None = "reward_failed"


class RewardLatched(RewardError):
    """The run has failed before; no reward is given any more."""

    cause = None


class RewardCancelled(RewardError):
    """An admitted score was cancelled (the daemon was told to stop before it could finish)."""

    cause = "reward_cancelled"


class RewardDeadline(RewardError):
    """The deadline passed before the score was finished."""

    cause = "reward_deadline"


class ReferenceMismatch(RewardError):
    """The question, or the answers sent with it, are not among the declared references."""

    code: ClassVar[str] = "reference_mismatch"
    cause = "reference_mismatch"


class NoUserTurn(RewardError):
    """The text has no user turn: another chat template, or special tokens lost in decoding."""

    code: ClassVar[str] = "no_user_turn"
    cause = "no_user_turn"


class TemplateDiffers(RewardError):
    """The scorer answered that it cannot read the text: template or decoding differ."""

    code: ClassVar[str] = "template_differs"
    cause = "template_differs"


class SolutionTooLong(RewardError):
    """The rollout is longer than ``reward.max_input_bytes``."""

    code: ClassVar[str] = "solution_too_long"
    cause = "solution_too_long"


class SourceChanged(RewardError):
    """The scorer's source no longer has the digest it was loaded with."""

    code: ClassVar[str] = "source_changed"
    cause = "source_changed"


class ScorerFailed(RewardError):
    """The pinned scorer raised, or returned something that is not a number."""

    code: ClassVar[str] = "scorer_failed"
    cause = "scorer_failed"


class NonFiniteReward(RewardError):
    """The pinned scorer returned NaN or an infinity."""

    code: ClassVar[str] = "nonfinite_reward"
    cause = "nonfinite_reward"


class PromptsDiffer(RewardError):
    """The second pass did not ask for exactly the prompts of the first, in order."""

    code: ClassVar[str] = "prompts_differ"
    cause = "prompts_differ"


class ProvenanceBroken(RewardError):
    """A result block stands where only the rollout writes, and no answer of this run says it."""

    code: ClassVar[str] = "provenance_broken"
    cause = "provenance_broken"


class VerdictsUnparsed(RewardError):
    """Too many of the last verdicts were neither ``0`` nor ``1``."""

    code: ClassVar[str] = "verdicts_unparsed"
    cause = "verdicts_unparsed"


class HelperFault(RewardError):
    """The reward helper did not give a usable, measured verdict.

    ``usage`` is ``(input_tokens, output_tokens)`` where the failed exchange was measured all the
    same: a wrong, empty or over-long answer was paid for. ``None`` means that nobody knows.
    """

    code: ClassVar[str] = "helper_failed"
    cause = "helper_failed"

    def __init__(self, message: str, *, usage: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.usage = usage


class HelperUnreachable(HelperFault):
    """No connection to the helper was ever established: the only fault that may be tried again."""

    code: ClassVar[str] = "helper_unreachable"
    cause = "helper_unreachable"


class HelperTransport(HelperFault):
    """The exchange broke after something had been sent."""

    code: ClassVar[str] = "helper_transport"
    cause = "helper_transport"


class HelperTimeout(HelperFault):
    """The helper did not answer in time."""

    code: ClassVar[str] = "helper_timeout"
    cause = "helper_timeout"


class HelperStatus(HelperFault):
    """The helper answered with a status other than 200."""

    code: ClassVar[str] = "helper_status"
    cause = "helper_status"


class HelperAnswerInvalid(HelperFault):
    """The helper's body is not JSON of the protocol's shape, or is over its bound."""

    code: ClassVar[str] = "helper_answer_invalid"
    cause = "helper_answer_invalid"


class HelperEmpty(HelperFault):
    """The helper's text is empty, which the pinned scorer would count as a correct round."""

    code: ClassVar[str] = "helper_empty"
    cause = "helper_empty"


class HelperUsageMissing(HelperFault):
    """The helper did not say how many tokens it read and wrote."""

    code: ClassVar[str] = "helper_usage_missing"
    cause = "helper_usage_missing"


class HelperFinishReason(HelperFault):
    """The helper finished for a reason other than stop or length."""

    code: ClassVar[str] = "helper_finish_reason"
    cause = "helper_finish_reason"


class HelperIdentity(HelperFault):
    """The helper serves another model than the one declared."""

    code: ClassVar[str] = "helper_identity"
    cause = "helper_identity"


class HelperOverlong(HelperFault):
    """The helper wrote more tokens than one call may have."""

    code: ClassVar[str] = "helper_overlong"
    cause = "helper_overlong"


class HelperRedirect(HelperStatus):
    """The helper answered with a redirect, which is never followed: the prompt holds answers."""

    code: ClassVar[str] = "helper_redirect"
    cause = "helper_redirect"


class HelperNotJson(HelperAnswerInvalid):
    """The helper's body is declared as something other than JSON: a proxy's or a login page."""

    code: ClassVar[str] = "helper_not_json"
    cause = "helper_not_json"


class HelperTruncated(HelperTransport):
    """The connection was lost in the middle of the helper's answer."""

    code: ClassVar[str] = "helper_truncated"
    cause = "helper_truncated"


class HelperNotSent(HelperFault):
    """The call was recorded but not sent, because another of its batch had failed: free."""

    code: ClassVar[str] = "helper_not_sent"
    cause = "helper_not_sent"


# --- many nodes: what the other nodes of a run, or the system between them, did to us -------------


class ClusterRefused(UsageError):
    """This node may not join the run: its name is taken, the run is full, or it differs."""

    code: ClassVar[str] = "cluster_refused"


class ClusterUnreachable(SidecarError):
    """The servers between the nodes did not answer in time, and nothing may be assumed instead."""

    code: ClassVar[str] = "cluster_unreachable"
    cause = "cluster_unreachable"


class ClusterUnreadable(SidecarError):
    """What another node is said to have written is not a value of this version of the package."""

    code: ClassVar[str] = "cluster_unreadable"
    cause = "cluster_unreadable"


class NodeLost(SidecarError):
    """A node of the run was not heard of for too long, or never joined it."""

    code: ClassVar[str] = "node_lost"
    cause = "node_lost"
