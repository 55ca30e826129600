"""The package's map: every module stands in it, and once."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "smartsearch_sidecar"
MAP = PACKAGE / "README.md"


def named() -> Counter[str]:
    """What the first column of the map names: ``ledger/file.py``, or ``doctor/`` for a room.

    A name without a folder belongs to the folder that the row named last.
    """
    found: Counter[str] = Counter()
    for row in re.findall(r"^\| (`[^|]*)\|", MAP.read_text(), re.MULTILINE):
        folder = ""
        for name in re.findall(r"`([^`]+)`", row):
            if name.endswith("/"):
                found[name] += 1
                continue
            if "/" in name:
                folder = name.rpartition("/")[0] + "/"
            found[name if "/" in name else folder + name] += 1
    return found


def test_every_module_is_on_the_map_once() -> None:
    """A module is named itself, or its room is; none is named twice, and none that is not there."""
    modules = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }
    names = named()
    rooms = tuple(name for name in names if name.endswith("/"))
    assert rooms
    assert [name for name, count in names.items() if count > 1] == []
    assert {name for name in names if not (PACKAGE / name).exists()} == set()
    assert {one for one in modules if one not in names and not one.startswith(rooms)} == set()
    assert {one for one in names if one.endswith(".py") and one.startswith(rooms)} == set()
