"""Copies what the files beside this one share out of the first of them: `make integrations`.

A trainer loads one file by its path, so that file can import nothing of this package. Therefore
each file has the shared regions it needs; they are edited in ``smartsearch_reward.py``. A region
begins with a line ``# --- shared: NAME`` and ends at the next one or at ``# --- end of shared``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "smartsearch_reward.py"
START = re.compile(r"^# --- shared: (?P<name>[a-z]+)\b", re.MULTILINE)
REGION = re.compile(
    START.pattern + r"[^\n]*\n.*?(?=^# --- (?:shared: |end of shared ))", re.MULTILINE | re.DOTALL
)


def regions() -> dict[str, str]:
    """The text of each region of the source, by its name."""
    found = REGION.finditer(SOURCE.read_text(encoding="utf-8"))
    return {region["name"]: region[0] for region in found}


def written(text: str, shared: dict[str, str]) -> str:
    """The text of one file with every region as ``shared`` has it.

    Raises ``ValueError`` for a region that ``shared`` does not have, and for one without an end.
    """
    found = [region["name"] for region in REGION.finditer(text)]
    if [start["name"] for start in START.finditer(text)] != found:
        raise ValueError("the last region has no line `# --- end of shared ---`")
    if unknown := set(found) - set(shared):
        raise ValueError(f"{SOURCE.name} has no region called {', '.join(sorted(unknown))}")
    return REGION.sub(lambda region: shared[region["name"]], text)


def main() -> None:
    """Writes the files that differ and names them."""
    shared = regions()
    for path in sorted(FOLDER.glob("*.py")):
        before = path.read_text(encoding="utf-8")
        try:
            after = written(before, shared)
        except ValueError as exc:
            sys.exit(f"{path}: {exc}. The file was not written.")
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"{path.name} is written.")


if __name__ == "__main__":
    main()
