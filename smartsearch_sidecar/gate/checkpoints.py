"""The gate: a checkpoint is accepted only while the run is healthy, with a receipt of its history.

A receipt names the claim, the sequence number and the sum of its own record, so ``ledger verify
--receipt`` can prove later which history the checkpoint was trained on. A refusal is recorded; it
does not close the latch, because work in flight is no failure.

Apart from the one route that calls it (``web/app.py``), because what a checkpoint needs is a
rule of the run, not of HTTP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from smartsearch_sidecar import errors
from smartsearch_sidecar.gate.health import check, counts
from smartsearch_sidecar.ledger.verify import RECEIPT_FORMAT
from smartsearch_sidecar.run.json_values import is_sha256
from smartsearch_sidecar.run.record import CheckpointAccepted, CheckpointRefused
from smartsearch_sidecar.search.service import Service

if TYPE_CHECKING:
    from smartsearch_sidecar.gate.cluster import ClusterRun

SETTLE_SECONDS = 30.0  # a trainer that saves has no rollouts in flight: the last may still end
STEP_MAX = 2**53
PATH_CHARACTERS_MAX = 4096


class CheckpointRequest(NamedTuple):
    """What a trainer is about to save; ``step`` counts optimizer steps from 0."""

    step: int
    path: str | None
    manifest_sha256: str | None


def parse_checkpoint(value: Any) -> CheckpointRequest:
    """Reads ``{"step": int, "path"?: str, "manifest_sha256"?: hex}``. Raises ``OperatorRequest``
    for anything else; the run is not touched by it.
    """
    if type(value) is not dict or not set(CheckpointRequest._fields).issuperset(value):
        why = "send an object of step, and optionally path, manifest_sha256"
        raise errors.OPERATOR_REQUEST(why)
    step, path, digest = value.get("step"), value.get("path"), value.get("manifest_sha256")
    if type(step) is not int or not 0 <= step <= STEP_MAX:
        raise errors.OPERATOR_REQUEST("step must be a whole number from 0")
    if path is not None and (type(path) is not str or not 0 < len(path) <= PATH_CHARACTERS_MAX):
        raise errors.OPERATOR_REQUEST("path must be text of at most 4096 characters")
    if digest is not None and not is_sha256(digest):
        raise errors.OPERATOR_REQUEST("manifest_sha256 must be 64 lower-case hex digits")
    return CheckpointRequest(step, path, digest)


async def take_checkpoint(
    service: Service,
    wanted: CheckpointRequest,
    *,
    settle_seconds: float = SETTLE_SECONDS,
    cluster_run: ClusterRun | None = None,
) -> tuple[bool, dict[str, Any]]:
    """Settles, checks, records and syncs; with a ``cluster_run`` every node is asked, and the
    receipt names each one's journal. Returns whether it was accepted, and the answer's body: the
    receipt, or the refusal with the run's state and first cause. Raises ``LedgerFailed`` where
    neither can be recorded.
    """
    state, recorder = service.run.state, service.run.recorder
    about: dict[str, Any] = {}
    nodes: dict[str, Any] | None = None
    if cluster_run is None:
        status = await check(service, settle_seconds)
    else:
        status, about["cluster"], nodes = await cluster_run.verdict(service, settle_seconds)
    read_back = 0
    if status == "healthy":
        read_back = await service.run.writer.read_back()
        status = await check(service, settle_seconds)
    # Nothing is awaited between the check and the record: what was checked is what is recorded.
    if status != "healthy":
        number = state.checkpoints_refused + 1
        refused = CheckpointRefused(number=number, **wanted._asdict(), state=status)
        await recorder.post_for_receipt(refused)
        reply = {"accepted": False, "step": wanted.step, "state": status}
        return False, {**reply, **counts(service), **about}
    accepted = CheckpointAccepted(
        number=state.checkpoints_accepted + 1,
        **wanted._asdict(),
        occurrence=state.checkpoint_steps[wanted.step] + 1,
        usage=state.usage(),
        nodes=nodes,
        read_back_bytes=read_back,
        result_blocks=state.scores.result_blocks() if state.scores.splits else None,
    )
    kept = await recorder.post_for_receipt(accepted)
    head = {"format": RECEIPT_FORMAT, "accepted": True, "number": accepted.number}
    tail = {"seq": kept.seq, "head": kept.head, "claim_sha256": state.claim_sha256}
    return True, {**head, **accepted.to_data(), **tail}
