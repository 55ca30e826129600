"""Who may ask what: targets, the order of the edge's checks, and the one table of statuses.

Targets are compared as the bytes sent, never decoded: a percent-encoded or absolute form of a right
path is another path.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

import orjson

from smartsearch_sidecar import errors

# The one table from what went wrong to what HTTP calls it.
STATUS: dict[str, int] = {
    "unauthorized": 401,
    "not_found": 404,
    "method_not_allowed": 405,
    "invalid_body": 400,
    "body_size": 413,
    "content_type": 415,
    "bad_message": 400,
    "busy": 429,
    "invalid_request": 400,
    "quota_exhausted": 429,
    "retrieval_failed": 502,
    "deadline": 504,
    "ledger_failed": 503,
    "cluster_unreachable": 503,
    "cluster_unreadable": 503,
    "node_lost": 503,
    "response_undelivered": 502,
    "internal_error": 500,
    "reward_failed": 502,
    "reference_mismatch": 409,
    "no_user_turn": 409,
    "template_differs": 409,
    "solution_too_long": 413,
    "source_changed": 502,
    "scorer_failed": 502,
    "nonfinite_reward": 502,
    "prompts_differ": 502,
    "provenance_broken": 409,
    "verdicts_unparsed": 502,
    "helper_failed": 502,
    "helper_unreachable": 502,
    "helper_transport": 502,
    "helper_timeout": 502,
    "helper_status": 502,
    "helper_answer_invalid": 502,
    "helper_empty": 502,
    "helper_usage_missing": 502,
    "helper_finish_reason": 502,
    "helper_identity": 502,
    "helper_overlong": 502,
    "helper_redirect": 502,
    "helper_not_json": 502,
    "helper_truncated": 502,
    "helper_not_sent": 502,
    "operator_request": 400,
    "not_ready": 503,
    "too_many_viewers": 503,
}

# What a caller is told. The sentences are constant, so that nothing of a request, a capability or a
# reference answer can reach an answer; the operator finds the detail in the ledger and the log.
SENTENCE: dict[str, str] = {
    "unauthorized": "No such path: the first segment must be the run's capability.",
    "not_found": "This capability serves no such route.",
    "method_not_allowed": "This route does not take this method.",
    "invalid_body": "Send the body whole, in time, with exactly one Content-Length.",
    "body_size": "The body is empty or over the limit (execute.body_bytes_max).",
    "content_type": "Send the body as application/json.",
    "bad_message": "This is not an HTTP/1.1 request this server can read.",
    "busy": "Every slot is taken and the request could not wait any longer.",
    "invalid_request": "The body is not a request of this route.",
    "quota_exhausted": "The run's quota is used up.",
    "retrieval_failed": "The run has failed and answers nothing more; ask /health for the cause.",
    "deadline": "The search was still running at its deadline.",
    "ledger_failed": "The ledger cannot record; nothing is answered that is not recorded.",
    "cluster_unreachable": "The servers between the run's nodes are not reached.",
    "cluster_unreadable": "The run's nodes do not understand each other; ask /health.",
    "node_lost": "A node of the run is lost; ask /health for the cause.",
    "response_undelivered": "The client had left.",
    "internal_error": "The sidecar broke a promise of its own; the run is over.",
    "reference_mismatch": "Question and answers are not those of the declared references.",
    "no_user_turn": "The text has no user turn: keep special tokens when decoding.",
    "template_differs": "The scorer cannot read the text: chat template or decoding differ.",
    "solution_too_long": "The rollout is over reward.max_input_bytes.",
    "provenance_broken": "A result block is no answer of this run; ask /health for the cause.",
    "operator_request": "A parameter or the body of this internal request is not allowed.",
    "not_ready": "The index is still loading.",
    "too_many_viewers": "Too many pages follow this run; close one.",
}


_REWARD_SENTENCE = "No reward was given and the run is over; ask /health for the cause."


def error_payload(code: str, message: str | None = None) -> bytes:
    """The JSON body of an error answer; ``message`` only where it is a constant sentence too."""
    message = message or SENTENCE.get(code, _REWARD_SENTENCE)
    return orjson.dumps({"error": {"code": code, "message": message, "retryable": False}})


@dataclass(frozen=True, slots=True)
class Target:
    """An authenticated request target: whose capability, and the segments after it."""

    internal: bool
    segments: tuple[str, ...]
    query: str


class Capabilities:
    """The two secrets of a run, compared in time that does not depend on how much is right."""

    def __init__(self, execute: str, internal: str) -> None:
        self._execute = execute.encode()
        self._internal = internal.encode()
        self._execute_target = b"/" + self._execute + b"/execute"
        self.capability_marker = b"/" + self._execute + b"/"

    def is_execute(self, raw_target: str) -> bool:
        """Exactly the rollout's path."""
        return hmac.compare_digest(
            raw_target.encode("utf-8", "surrogateescape"), self._execute_target
        )

    def read(self, raw_target: str) -> Target:
        """Splits a target; raises ``Unauthorized`` without a hint which part was wrong."""
        path, _, query = raw_target.partition("?")
        whole = raw_target.split("/")
        parts = path.split("/")
        execute = hmac.compare_digest(_second(whole), self._execute)
        internal = hmac.compare_digest(_second(parts), self._internal)
        if parts[0] == "" and internal:
            return Target(True, tuple(parts[2:]), query)
        # A rollout's query string belongs to the segment it stands in: it is never served.
        if whole[0] == "" and execute and len(whole) == 3:
            return Target(False, (whole[2],), "")
        raise errors.Unauthorized("wrong or no capability")


def _second(parts: list[str]) -> bytes:
    return (parts[1] if len(parts) > 1 else "").encode("utf-8", "surrogateescape")


def declared_length(transfer_encoding: bool, lengths: list[str], bytes_max: int) -> int:
    """The body's length in bytes.

    Raises ``InvalidBody`` unless it is declared exactly once in decimal digits, ``BodySize``
    outside 1 to ``bytes_max``.
    """
    if transfer_encoding or len(lengths) != 1:
        raise errors.InvalidBody("the body's length is not declared exactly once")
    text = lengths[0]
    if not (text.isascii() and text.isdigit()):
        raise errors.InvalidBody("Content-Length is not a decimal number")
    digits = text.lstrip("0")
    if not digits or len(digits) > 12 or int(digits) > bytes_max:
        raise errors.BodySize(f"the body is empty or over {bytes_max} bytes")
    return int(digits)


def require_json(content_type: str) -> None:
    """Raises ``ContentType`` unless the media type, parameters aside, is ``application/json``."""
    if content_type == "application/json":
        return
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise errors.ContentType("the media type is not application/json")
