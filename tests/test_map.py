"""The package's map: every module stands in it, and once; and its table of invariants."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "smartsearch_sidecar"
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


INVARIANT = re.compile(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def test_every_invariant_is_held_and_tried() -> None:
    """Each invariant names modules of the package and tests that are there, and has a number."""
    rows = INVARIANT.findall(MAP.read_text())
    assert [int(number) for number, *_ in rows] == list(range(len(rows)))
    assert len(rows) > 17
    for number, _, held_by, tried_by in rows:
        modules, tests = (re.findall(r"`([^`]+)`", cell) for cell in (held_by, tried_by))
        assert modules, number
        assert tests, number
        assert [name for name in modules if not (PACKAGE / name).is_file()] == [], number
        for test in tests:
            name, _, function = test.partition("::")
            path = TESTS / name
            assert path.is_file(), f"{number}: {test}"
            assert f"def {function}(" in path.read_text(), f"{number}: {test}"


def test_cited_invariants_are_there() -> None:
    """A test that cites invariants by number cites those of the table."""
    last = len(INVARIANT.findall(MAP.read_text())) - 1
    cited = {
        int(number)
        for path in TESTS.rglob("*.py")
        for numbers in re.findall(r"nvariants? (\d[\d, \nandto]*)", path.read_text())
        for number in re.findall(r"\d+", numbers)
    }
    assert len(cited) > 7
    assert max(cited) <= last
