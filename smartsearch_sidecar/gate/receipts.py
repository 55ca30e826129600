"""Whether a checkpoint's receipt is of this run's ledger, or of a run that it follows.

A trainer asks before it loads a checkpoint. The claim of a run names the run before it
(``run.previous``) with its end and its last checkpoint, so a receipt of an earlier run is found
along that chain for as long as the directories are there. A claim in the chain must be the one that
its follower names, and its history must end where its follower says.

Apart from ``gate/checkpoints.py``: that asks the state of a live run, this one reads files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.file import CLAIM
from smartsearch_sidecar.ledger.reader import RunReader
from smartsearch_sidecar.ledger.receipt import CheckpointReceipt
from smartsearch_sidecar.ledger.recovery import Ending, read_object
from smartsearch_sidecar.ledger.verify import Verification, verify
from smartsearch_sidecar.run.line import claim_digest

Answer = dict[str, str]
"""``verdict`` (``known``, ``refused``, ``unknown``) and ``detail``, a sentence."""


def compare(directory: Path, value: Any) -> Answer:
    """Holds a receipt, as the JSON value that a trainer kept, against the ledger in ``directory``.

    ``known``: the ledger has its record, with this sum and these values. ``refused``: the ledger
    says otherwise. ``unknown``: no ledger that can be read here is of the receipt's run. Blocking:
    it reads whole journals, at the rate of ``ledger verify``.
    """
    try:
        receipt = CheckpointReceipt.parse(orjson.dumps(value))
        return _along_the_chain(directory, receipt)
    except errors.SidecarError as exc:  # no receipt, or a directory that holds no history
        return _answer("refused", exc.message)


def _along_the_chain(directory: Path, receipt: CheckpointReceipt) -> Answer:
    wanted = {receipt.own.claim_sha256, *(node.claim_sha256 for node in receipt.nodes.values())}
    follower: Mapping[str, Any] | None = None
    passed: set[str] = set()
    while True:
        claim = _claim(directory)
        digest = None if claim is None else claim_digest(claim)
        named = None if follower is None else follower.get("claim_sha256")
        if follower is not None and digest != named:
            return _from_follower(directory, receipt, follower, wanted)
        if digest is None or claim is None or digest in passed:
            return _answer("unknown", _STRANGE)
        if digest in wanted:
            return _judge(verify(directory, receipt=receipt), receipt, follower)
        passed.add(digest)
        follower, before = _run_before(claim)
        if follower is None or before is None:
            return _answer("unknown", _STRANGE)
        directory = before


_STRANGE = (
    "the receipt is of another run, and no claim names that one: give the old run's directory as "
    "run.previous of this one"
)


def _claim(directory: Path) -> bytes | None:
    try:
        return RunReader(directory).read(CLAIM)
    except errors.UsageError:  # moved, removed, or not readable by this process
        return None


def _run_before(claim: bytes) -> tuple[Mapping[str, Any] | None, Path | None]:
    """What a claim says of the run before it, and where that run's directory was."""
    value = read_object(claim)
    previous, config = value.get("previous"), value.get("config", {})
    place = config.get("run", {}).get("previous")
    return previous, None if place is None else Path(place)


def _from_follower(
    directory: Path, receipt: CheckpointReceipt, follower: Mapping[str, Any], wanted: set[str]
) -> Answer:
    """The run before is not where it was: its follower's claim still names its last checkpoint."""
    place = receipt.place(follower.get("claim_sha256"))
    last = follower.get("last_checkpoint") or {}
    if follower.get("claim_sha256") in wanted:
        stated = {**receipt.value, "seq": place.seq, "head": place.head}
        if all(last.get(key) == stated.get(key) for key in ("number", "step", "seq", "head")):
            return _answer("known", "it is the last checkpoint that the next run's claim names")
    return _answer(
        "unknown",
        f"the ledger of the run before, {directory}, is no longer there, and its last checkpoint "
        "is another: put the directory back",
    )


def _judge(
    found: Verification, receipt: CheckpointReceipt, follower: Mapping[str, Any] | None
) -> Answer:
    if found.receipt_problem is not None:
        return _answer("refused", found.receipt_problem)
    if found.problem is not None and (follower is None or found.ending is not Ending.TORN):
        return _answer("refused", f"{found.directory} is no whole history: {found.problem}")
    if follower is not None and (found.seq, found.head) != (
        follower.get("seq"),
        follower.get("head"),
    ):
        return _answer(
            "refused",
            f"{found.directory} has another end than when the next run began: it was changed",
        )
    seq = receipt.place(found.claim_sha256).seq
    return _answer("known", f"it is record {seq} of {found.directory.name}")


def _answer(verdict: str, detail: str) -> Answer:
    return {"verdict": verdict, "detail": detail}
