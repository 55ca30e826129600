"""Helper calls: each reserved, recorded and synced before it is sent, and settled after."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any, Literal

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.recorder import Recorder
from smartsearch_sidecar.ledger.writer import Receipt
from smartsearch_sidecar.reward.dispatch import HelperDispatch, QuotaGate, to_the_end
from smartsearch_sidecar.reward.wire import HelperAnswer
from smartsearch_sidecar.run.helper_budget import WAIT, Reservation
from smartsearch_sidecar.run.record import Kind
from smartsearch_sidecar.run.reward_state import Scores
from smartsearch_sidecar.run.shared_quota import Allowance
from smartsearch_sidecar.scoring.rows import Row


class MeteredCalls:
    """Asks the helper on behalf of rows, and keeps the ledger and the quotas in step."""

    def __init__(
        self,
        recorder: Recorder,
        scores: Scores,
        dispatch: HelperDispatch,
        *,
        seed: int,
        allowance: Allowance | None = None,
    ) -> None:
        """``allowance`` is asked for room before each call where a run has many nodes."""
        self._recorder = recorder
        self._scores = scores
        self._dispatch = dispatch
        self._seed = seed
        self._gates = {split: QuotaGate() for split in scores.splits}
        self._allowance = allowance
        if allowance is not None:
            for gate in self._gates.values():
                allowance.woken(gate.wake)

    async def ask(
        self, owners: Sequence[Row], prompts: Sequence[str], deadline: float
    ) -> list[str]:
        """The helper's texts, in order; ``owners`` names the row of each prompt.

        Raises what failed first, with every call that was sent settled.
        """

        async def before(place: int) -> int:
            return await self._reserve(owners[place], prompts[place].encode())

        def after(place: int, number: int, answer: HelperAnswer) -> None:
            self._answered(owners[place], number, answer)

        def failed(place: int, number: int, exc: Exception) -> None:
            self._failed(owners[place], number, exc)

        return await self._dispatch.ask_all(
            prompts, before=before, after=after, failed=failed, deadline=deadline
        )

    async def _reserve(self, row: Row, prompt: bytes) -> int:
        receipts: list[asyncio.Future[Receipt]] = []
        data = {
            "split": row.split,
            "score": row.number,
            "prompt_sha256": hashlib.sha256(prompt).hexdigest(),
            "prompt_bytes": len(prompt),
            "seed": self._seed,
        }

        def reserve() -> Reservation | Literal["wait"]:
            # Decided and folded in one step: the next one to ask sees this call counted. A run that
            # has failed spends nothing more, also not for a score admitted before.
            self._recorder.state.refuse_closed()
            decision = self._scores.splits[row.split].admit()
            if self._allowance is not None and not self._allowance.room_to_call(row.split):
                return WAIT
            if isinstance(decision, Reservation):
                item = self._recorder.fold(Kind.HELPER_REQUESTED, decision.number, data)
                receipts.append(self._recorder.writer.post_for_receipt(item))
            return decision

        reserved = await self._gates[row.split].reserve(reserve)
        await to_the_end(_durable(receipts))
        return reserved.number

    def _answered(self, row: Row, number: int, answer: HelperAnswer) -> None:
        data = {
            "split": row.split,
            "score": row.number,
            "text": answer.text,
            "input_tokens": answer.input_tokens,
            "output_tokens": answer.output_tokens,
            "finish_reason": answer.finish_reason,
            "model": answer.model,
        }
        self._settle(row, Kind.HELPER_ANSWERED, number, data)

    def _failed(self, row: Row, number: int, exc: Exception) -> None:
        fault = exc if isinstance(exc, errors.HelperFault) else None
        data = {
            "split": row.split,
            "score": row.number,
            "code": fault.code if fault else "internal_error",
            "detail": fault.message if fault else type(exc).__name__,
            "usage": list(fault.usage) if fault and fault.usage else None,
            "sent": not errors.HELPER_NOT_SENT.matches(exc),
        }
        self._settle(row, Kind.HELPER_FAILED, number, data)

    def _settle(self, row: Row, kind: Kind, number: int, data: dict[str, Any]) -> None:
        self._recorder.post(kind, number, data)
        self._gates[row.split].wake()


async def _durable(receipts: Sequence[asyncio.Future[Receipt]]) -> None:
    for receipt in receipts:
        await receipt
