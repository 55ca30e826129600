"""What the nodes of one run share, as the code that serves a request sees it: a Protocol.

A run of one node has none (``None``), and asks nothing. A node of many asks before each number it
gives; what it holds of the run's quotas was leased, so asking costs a comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol


class SharedQuota(Protocol):
    """Room within what this node has leased. Each method returns in the very step of the loop in
    which it found room, so that its caller can number and fold before any other task runs.
    """

    async def room_to_search(self, deadline: float) -> None:
        """Waits until one more search may be numbered; ``deadline`` is loop time.

        Raises ``LatchClosed``, ``QuotaExhausted`` where all of the run's is leased, or
        ``ClusterUnreachable`` where the servers between the nodes do not answer.
        """
        ...

    async def room_to_score(self, wanted: Callable[[], Mapping[str, int]], deadline: float) -> None:
        """The same for the scores that ``wanted()`` counts per split, all of them or none."""
        ...

    def room_to_call(self, split: str, wanted: int) -> int:
        """How many of ``wanted`` helper calls fit; if none does, more is asked for, and ``woken``
        are called then.

        Raises as the others do, where waiting cannot help.
        """
        ...

    def woken(self, wake: Callable[[], None]) -> None:
        """``wake`` is called, on the loop, whenever ``room_to_call`` may have another answer."""
        ...

    async def answers_known(self, deadline: float) -> None:
        """Returns once every answer that any node had handed over by now is known here.

        Raises ``ClusterUnreachable`` where that cannot be said.
        """
        ...
