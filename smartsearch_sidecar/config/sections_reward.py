"""``[reward]``: what scores a rollout, what a score may cost, and who gives the verdicts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from smartsearch_sidecar.config.keys import MIB, Section, key, seconds, whole
from smartsearch_sidecar.config.profiles import preset
from smartsearch_sidecar.config.values import FilePath, HttpUrl, Sha256, Words


class Quotas(Section):
    """What one split of the references may cost."""

    max_scores: int = whole(10_000, 0, 1_000_000_000, "scores", "Scored rollouts.")
    max_helper_calls: int = whole(
        100_000, 0, 1_000_000_000, "calls", "Calls to the helper; each costs GPU time."
    )
    max_output_tokens: int = whole(
        10_000_000,
        0,
        1_000_000_000_000,
        "tokens",
        "Tokens the helper writes, 2048 reserved a call.",
    )


class References(Section):
    """Question and answers per split, from the trainer's Parquet or JSONL."""

    train: FilePath | None = key(None, "The training split.")
    validation: FilePath | None = key(None, "The validation split; no question may be in both.")


class Helper(Section):
    """The language model the pinned scorer asks for its verdicts."""

    kind: Literal["sglang", "completions"] = key(
        "sglang", "SGLang's `/generate`, or an OpenAI-compatible `/v1/completions`."
    )
    url: HttpUrl | None = key(None, "The helper's address. Needed with rewards.")
    model: Words | None = key(None, "The name it serves the model under. Needed with rewards.")
    model_sha256: Sha256 | None = key(
        None, "The model, as the operator declares it. Needed with rewards."
    )
    timeout_seconds: float = seconds(
        120, 3600, "One call: 2048 tokens at a busy helper. A late answer fails the score."
    )
    concurrency: int = whole(
        64, 1, 4096, "calls", "Sent to the helper at once; more only queue inside it."
    )


class Reward(Quotas):
    """Rewards by the pinned scorer. The three quotas here are the training split's."""

    enabled: bool = key(False, "Serves `/reward`; needs scorer, references and helper.")
    checkout: FilePath | None = key(
        None,
        "The operator's checkout of the pinned trainer: commit, clean tree and scorer checked.",
    )
    source: FilePath | None = key(
        None, "Instead of a checkout: the scorer's one file, pinned by `source_sha256`."
    )
    source_sha256: Sha256 | None = key(None, "The digest of `source`.")
    slots: int = whole(
        8, 1, 1024, "requests", "Scored at once; a batch holds one, its calls are bounded below."
    )
    waiting_max: int = whole(
        64, 0, 65536, "requests", "The waiting room; a full one closes the latch."
    )
    deadline_seconds: float = seconds(
        600, 86400, "Waiting and scoring of one request, all helper calls of a batch included."
    )
    batch_max: int = whole(64, 1, 4096, "rows", "Rows of one batch; all are held until all are in.")
    max_input_bytes: int = whole(
        16 * MIB, 1, 256 * MIB, "bytes", "One rollout's text; far above any context window."
    )
    seed: int = whole(17, 0, 2**31 - 1, "", "Sent to a helper whose protocol has a seed.")
    provenance: Literal["enforce", "record", "off"] = key(
        preset("reward.provenance"),
        "Whether each passage block of a scored rollout must be an answer this run gave.",
    )
    side_by_side: bool = key(
        preset("reward.side_by_side"), "Sends the helper calls of a row, and of a batch, together."
    )
    reuse_identical: bool = key(
        preset("reward.reuse_identical"),
        "Gives a repeated rollout its recorded score: the trainer scores each batch twice.",
    )
    unparsed_share_max: float = Field(
        preset("reward.unparsed_share_max"),
        ge=0,
        le=1,
        description="Verdicts that are neither 0 nor 1 count as correct upstream: above this share "
        "of the last 200 the latch closes. 1.0 never does.",
        json_schema_extra={"unit": "share"},
    )
    references: References = Field(default_factory=References)
    validation: Quotas = Field(default_factory=Quotas)
    helper: Helper = Field(default_factory=Helper)
