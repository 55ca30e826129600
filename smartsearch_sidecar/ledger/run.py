"""A run as everything that serves it sees it: one value, passed around whole."""

from __future__ import annotations

from dataclasses import dataclass

from smartsearch_sidecar.ledger.recorder import Recorder
from smartsearch_sidecar.ledger.writer import Writer
from smartsearch_sidecar.metrics import Observer
from smartsearch_sidecar.run.shared_quota import SharedQuota
from smartsearch_sidecar.run.state import RunState


@dataclass(frozen=True, slots=True)
class Run:
    """What the services, the gate and the page of one run share.

    ``state`` is read to decide; ``recorder`` folds and records what was decided, through
    ``writer``; ``quota`` is asked before each number where the run has other nodes; ``observer``
    hears of every record that is on the medium.
    """

    state: RunState
    recorder: Recorder
    writer: Writer
    quota: SharedQuota | None
    observer: Observer
