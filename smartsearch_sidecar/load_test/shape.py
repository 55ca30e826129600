"""The shape of the pinned rollout's calls, and the names of what can come of one."""

from __future__ import annotations

from typing import Final

THREADS_PER_RANK: Final = 8
"""Calls a rank has out at once; each opens a connection of its own."""
CLIENT_SECONDS: Final = 10.0
"""After which it leaves, and the rollout reads that the execution timed out."""

ANSWERED: Final = "answered"
DECLINED: Final = "declined"
"""Outcomes that are no failure; every other is a status and code, ``timeout`` or ``lost``."""
TIMEOUT: Final = "timeout"
LOST: Final = "lost"
