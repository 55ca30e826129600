"""Where the trainer's own scorer is looked for: one file of a public repository, never shipped.

A run that has the file compares both passes of ours with it. Every other run says that it did not.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from smartsearch_sidecar.reward.source import PINNED

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "SMARTSEARCH_SIDECAR_PINNED_SCORER"
PLACE = ROOT / ".cache" / "scorer" / Path(PINNED.path).name
MISSING = (
    f"rewards were not compared with the pinned scorer: put {PINNED.path} of RUC-NLPIR/SmartSearch "
    f"at {PINNED.commit} into {PLACE.relative_to(ROOT)}, or name it by {VARIABLE}"
)


def pinned_scorer() -> Path | None:
    """The file that the variable names, or the one in ``PLACE``; None without either.

    Raises:
        AssertionError: The file is there, and it is another one.
    """
    named = os.environ.get(VARIABLE)
    path = Path(named) if named else PLACE
    if not named and not path.is_file():
        return None
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    assert found == PINNED.sha256, f"{path} has sha256 {found}, the pinned scorer {PINNED.sha256}"
    return path
