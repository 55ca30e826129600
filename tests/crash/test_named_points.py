"""A real daemon killed at every named point of its ledger: starting, under load, closing, resuming.

Invariants 1, 4, 6 and 12 of the package's README. After each death everything a client was told is
in the journal, verify passes or says torn, and the resumed run is healthy only where nothing was
lost: it never began, or it had ended in order.
"""

from __future__ import annotations

import ast
import inspect
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from smartsearch_sidecar.ledger import file
from tests.crash.harness import (
    KILLED,
    Journal,
    Launcher,
    Told,
    check_history,
    check_restart,
    load,
)

pytestmark = pytest.mark.process

UNCLEAN = "unclean_restart"
TORN_TAIL = b'{"seq":1000,"at":"2026-'
ROTATING: dict[str, Any] = {"passage_bytes": 10_000, "ledger__segment_mib": 1}

# --- while it starts ------------------------------------------------------------------------------

# Point, and the latch cause of the run that is then resumed: none where nothing was recorded yet.
STARTING: list[tuple[str, str | None]] = [
    ("directory:made", None),
    ("claim.json:before", None),
    ("claim.json:half", None),
    ("claim.json:written", None),
    ("claim.json:after", None),
    ("rotate:before", None),
    ("rotate:after", None),
    ("write:before", None),
    ("write:half", None),
    ("write:after", UNCLEAN),
    ("sync:before", UNCLEAN),
    ("sync:after", UNCLEAN),
    ("endpoints.json:before", UNCLEAN),
    (".endpoints.json.new:half", UNCLEAN),
    ("endpoints.json:written", UNCLEAN),
    ("endpoints.json:after", UNCLEAN),
]


@pytest.mark.parametrize(("point", "cause"), STARTING)
def test_killed_while_starting(
    launcher: Launcher, tmp_path: Path, point: str, cause: str | None
) -> None:
    """Before its first record a run is begun by ``--resume``; from then on its end was unclean."""
    directory = tmp_path / "run"
    assert launcher.start(directory, point=point).wait() == KILLED
    assert check_restart(launcher, directory, []) == cause


# --- under load -----------------------------------------------------------------------------------

LOADED: list[tuple[str, int]] = [
    ("write:before", 12),
    ("write:half", 12),
    ("write:after", 12),
    ("sync:before", 12),
    ("sync:after", 12),
    ("rotate:before", 2),
    ("rotate:after", 2),
]


@pytest.mark.parametrize(("point", "nth"), LOADED)
def test_killed_under_load(launcher: Launcher, tmp_path: Path, point: str, nth: int) -> None:
    """Nothing that a client was told is missing, and the run is over."""
    directory = tmp_path / "run"
    keys = ROTATING if point.startswith("rotate") else {}
    daemon = launcher.start(directory, point=point, nth=nth, **keys)
    with load(daemon.ready()) as clients:
        clients.until(lambda _: False)
    assert daemon.wait() == KILLED
    assert clients.told
    if point.startswith("rotate"):
        assert (directory / "journal" / "000002.jsonl").exists() == (point == "rotate:after")
    cause = check_restart(launcher, directory, clients.told, **keys)
    assert cause in (UNCLEAN, "unresolved_after_restart")
    # The second restart finds a failed run, and gives its first cause again.
    assert check_restart(launcher, directory, clients.told, **keys) == cause


LATCHING = ["latch.json:before", "latch.json:half", "latch.json:written", "latch.json:after"]


@pytest.mark.parametrize("point", LATCHING)
def test_killed_while_the_latch_is_written(launcher: Launcher, tmp_path: Path, point: str) -> None:
    """The cause was on the medium before its file was begun, and is the resumed run's."""
    directory = tmp_path / "run"
    daemon = launcher.start(directory, point=point)
    with load(daemon.ready()) as clients:
        clients.until(lambda so_far: len(so_far.told) > 8)
        with pytest.raises(Exception, match="no sidecar answers"):
            daemon.internal().call("POST", "/latch", {"reason": "to be killed over"})
    assert daemon.wait() == KILLED
    assert check_restart(launcher, directory, clients.told) == "operator"


# --- while it ends --------------------------------------------------------------------------------


def test_killed_behind_its_orderly_end(launcher: Launcher, tmp_path: Path) -> None:
    """Once ``run.closed`` is on the medium the end is clean, also if a kill follows."""
    directory = tmp_path / "run"
    daemon = launcher.start(directory, point="endpoints.json:removed")
    with load(daemon.ready()) as clients:
        clients.until(lambda so_far: len(so_far.told) > 8)
    assert daemon.stop() == KILLED
    assert check_restart(launcher, directory, clients.told) is None


def test_clean_end_resumes_clean(launcher: Launcher, tmp_path: Path) -> None:
    """SIGTERM after the last answer: exit 0, healthy again, and the numbers go on."""
    directory = tmp_path / "run"
    told: list[Told] = []
    for again in (False, True):
        daemon = launcher.start(directory, resume=again)
        with load(daemon.ready()) as clients:
            clients.until(lambda so_far: len(so_far.told) > 8)
        told += clients.told
        assert daemon.stop() == 0
    found = check_history(directory, told)
    assert found.ok
    assert found.state.attempts == len(told)
    assert check_restart(launcher, directory, told) is None


def test_stopped_under_load(launcher: Launcher, tmp_path: Path) -> None:
    """SIGTERM between answers: what was told is recorded, and exit code and restart agree."""
    directory = tmp_path / "run"
    daemon = launcher.start(directory)
    with load(daemon.ready()) as clients:
        clients.until(lambda so_far: len(so_far.told) > 20)
        code = daemon.stop()
    assert code in (0, 4)
    assert check_history(directory, clients.told).ok
    assert (check_restart(launcher, directory, clients.told) is None) == (code == 0)


# --- while it resumes -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Dead:
    """A run whose process was killed while nothing was in flight."""

    directory: Path
    told: list[Told]


@pytest.fixture(scope="session")
def dead(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Dead:
    """The run that every test of a resume takes a copy of."""
    directory = tmp_path_factory.mktemp("dead") / "run"
    daemon = launcher.start(directory)
    with load(daemon.ready()) as clients:
        clients.until(lambda so_far: len(so_far.told) > 8)
    daemon.kill()
    return Dead(directory, clients.told)


def _segment(directory: Path) -> Path:
    return directory / "journal" / "000001.jsonl"


def torn(directory: Path) -> None:
    """Half a record at the end."""
    with _segment(directory).open("ab") as stream:
        stream.write(TORN_TAIL)


def open_ended(directory: Path) -> None:
    """A last record that lacks its newline."""
    raw = _segment(directory).read_bytes()
    _segment(directory).write_bytes(raw.removesuffix(b"\n"))


def unclean(directory: Path) -> None:
    """Nothing but the missing end."""


# What the disk looks like, the point, the how-manieth time.
RESUMING: list[tuple[Callable[[Path], None], str, int]] = [
    (torn, "torn:before", 1),
    (torn, "torn:half", 1),
    (torn, "torn:written", 1),
    (torn, "torn:after", 1),
    (torn, "trim:before", 1),
    (torn, "trim:after", 1),
    (open_ended, "newline:after", 1),
    (unclean, "endpoints.json:removed", 1),
    (unclean, "write:before", 1),
    (unclean, "write:half", 1),
    (unclean, "write:after", 1),
    (unclean, "sync:before", 1),
    (unclean, "sync:after", 1),
    (unclean, "write:before", 2),
    (unclean, "write:half", 2),
    (unclean, "write:after", 2),
    (unclean, "sync:after", 2),
    (unclean, "latch.json:before", 1),
    (unclean, "latch.json:half", 1),
    (unclean, "latch.json:written", 1),
    (unclean, "latch.json:after", 1),
    (unclean, "endpoints.json:written", 1),
]


@pytest.mark.parametrize("moment", RESUMING, ids=lambda one: f"{one[0].__name__}-{one[1]}-{one[2]}")
def test_killed_while_resuming(
    launcher: Launcher, tmp_path: Path, dead: Dead, moment: tuple[Callable[[Path], None], str, int]
) -> None:
    """Every step of a resume may be the last one: the next resume ends where it would have."""
    damage, point, nth = moment
    directory = tmp_path / "run"
    shutil.copytree(dead.directory, directory)
    damage(directory)
    assert launcher.start(directory, point=point, nth=nth, resume=True).wait() == KILLED
    assert check_restart(launcher, directory, dead.told) == UNCLEAN
    assert Journal.of(directory).kinds.count("latch.closed") == 1
    if damage is torn:
        kept = {path.read_bytes() for path in directory.glob("torn-*")}
        assert TORN_TAIL in kept


def test_killed_while_a_missing_latch_is_written_again(launcher: Launcher, tmp_path: Path) -> None:
    """``latch.json`` is made from its record as often as it takes."""
    directory = tmp_path / "run"
    daemon = launcher.start(directory)
    daemon.internal().call("POST", "/latch", {"reason": "by hand"})
    daemon.kill()
    (directory / "latch.json").unlink()
    assert launcher.start(directory, point="latch.json:before", resume=True).wait() == KILLED
    assert launcher.start(directory, point="latch.json:half", resume=True).wait() == KILLED
    assert check_restart(launcher, directory, []) == "operator"


def test_killed_while_a_cut_claim_is_removed(launcher: Launcher, tmp_path: Path) -> None:
    """A claim that was cut short named no run: it is removed, and the run begun."""
    directory = tmp_path / "run"
    assert launcher.start(directory, point="claim.json:half").wait() == KILLED
    assert launcher.start(directory, point="claim.json:removed", resume=True).wait() == KILLED
    assert check_restart(launcher, directory, []) is None


# --- no point is left out -------------------------------------------------------------------------


def named_points() -> set[str]:
    """Every name given to ``Disk.point`` in the package; a file's name is left out of it."""
    found: set[str] = set()
    for module in (file,):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "point":
                (argument,) = node.args
                found.add(ast.unparse(argument).strip("f'\"").replace("{name}", ""))
    return found


def test_every_point_is_killed_at() -> None:
    """A point that the ledger names is in a table above, for every file that reaches it."""
    struck = {point for point, *_ in (*STARTING, *LOADED, *((one, 1) for one in LATCHING))}
    struck |= {point for _, point, _ in RESUMING}
    files = {":removed": ("endpoints.json",)}
    every = ("claim.json", "latch.json", "torn", "endpoints.json")
    for point in named_points():
        forms = [name + point for name in files.get(point, every)] if point[0] == ":" else [point]
        assert set(forms) <= struck
    assert len(named_points()) >= 14
