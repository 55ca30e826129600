"""Canaries on a timer: the verdict over a declared identity while a run goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from smartsearch_sidecar import errors
from smartsearch_sidecar.retrieval.canaries import Canary, changed, check
from smartsearch_sidecar.retrieval.provider import Provider

CANARY_SECONDS: Final = 60.0
"""Between two rounds. No key, since nobody has to choose it: what a swapped index answers reaches a
minute of rollouts at most before the latch closes, and some tens of canaries are no load."""
TRANSPORT_FAULTS_MAX: Final = 3
"""Rounds in a row that may fail to reach the retriever: one lost connection is no verdict."""


class CanaryWatch:
    """Asks the canaries every ``seconds`` and holds the verdict.

    ``fault`` is ``None`` while the identity holds. ``IdentityChanged`` stays for good; a fault of
    reaching or asking the retriever lasts until a round succeeds. ``on_fault`` is called on the
    loop after each failing round, so that a latch can close without waiting for the next search.
    """

    def __init__(
        self,
        provider: Provider,
        canaries: Sequence[Canary],
        *,
        seconds: float,
        on_fault: Callable[[errors.RetrievalError], None] | None = None,
    ) -> None:
        self.fault: errors.RetrievalError | None = None
        self.rounds = 0
        self._provider = provider
        self._canaries = canaries
        self._seconds = seconds
        self._on_fault = on_fault
        self._unreached = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins the rounds, the first after ``seconds``."""
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def close(self) -> None:
        """Ends the rounds."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            raise error

    async def round(self) -> None:
        """Asks every canary once and sets ``fault``; raises nothing but cancellation."""
        try:
            differences = await check(self._provider, self._canaries)
        except errors.ProviderTransport as error:
            self._unreached += 1
            if self._unreached >= TRANSPORT_FAULTS_MAX:
                self._fail(
                    errors.PROVIDER_FAULT(
                        f"the canaries could not be asked {self._unreached} times in a row: "
                        f"{error.message}"
                    )
                )
        except errors.RetrievalError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - classified: becomes the watch's fault
            # Not a failure the provider names, so a broken one: without this the timer would end
            # in silence and the run would go on undefended.
            self._fail(errors.PROVIDER_FAULT(f"asking a canary raised {type(error).__name__}"))
        else:
            self._unreached = 0
            if differences:
                self._fail(changed(differences, len(self._canaries)))
            elif not errors.IDENTITY_CHANGED.matches(self.fault):
                self.fault = None
        self.rounds += 1

    async def _watch(self) -> None:
        while not errors.IDENTITY_CHANGED.matches(self.fault):
            await asyncio.sleep(self._seconds)
            await self.round()

    def _fail(self, fault: errors.RetrievalError) -> None:
        if errors.IDENTITY_CHANGED.matches(self.fault):
            return
        self.fault = fault
        if self._on_fault is not None:
            self._on_fault(fault)
