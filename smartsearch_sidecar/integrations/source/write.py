"""Writes the shared regions of ``integrations/*.py`` from ``shared.py``: `make integrations`.

A new file needs a line ``# --- shared: NAME ---`` and a line ``# --- end of shared ---`` for each
region it wants. What lies between them is replaced; the rest of the file is edited by hand. The
file keeps its own imports: ruff says which are missing and which are needless.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("shared.py")
FOLDER = SOURCE.parent.parent
HEADER = (
    "# The regions marked `shared` are written by `make integrations` from source/shared.py: "
    "edit there.\n"
)
START = re.compile(r"^# --- shared: (?P<name>[a-z]+)\b", re.MULTILINE)
REGION = re.compile(
    r"^# --- shared: (?P<name>[a-z]+)\b[^\n]*\n(?P<body>.*?)^# --- end of shared [^\n]*\n",
    re.MULTILINE | re.DOTALL,
)


def regions() -> dict[str, str]:
    """The text of each region of ``shared.py``, by its name."""
    found = REGION.finditer(SOURCE.read_text(encoding="utf-8"))
    return {region["name"]: region["body"] for region in found}


def written(text: str, shared: dict[str, str]) -> str:
    """The text of one file with its header and with every region as ``shared`` has it.

    Text without a region comes back as it is. Raises ``ValueError`` for a region that ``shared``
    does not have, and for one without an end.
    """
    found = [region["name"] for region in REGION.finditer(text)]
    if [start["name"] for start in START.finditer(text)] != found:
        raise ValueError("a region has no line `# --- end of shared ---`")
    if unknown := set(found) - set(shared):
        raise ValueError(f"{SOURCE.name} has no region called {', '.join(sorted(unknown))}")
    if not found:
        return text
    filled = REGION.sub(lambda region: _marked(region["name"], shared[region["name"]]), text)
    return filled if filled.startswith(HEADER) else HEADER + filled


def _marked(name: str, body: str) -> str:
    start = f"# --- shared: {name}, from source/shared.py ".ljust(100, "-")
    return f"{start}\n{body}{'# --- end of shared '.ljust(100, '-')}\n"


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
