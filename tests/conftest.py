"""What every test stands on: event loops, a detector of blocking calls, no silent skips in CI."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from types import FrameType

import hypothesis
import pytest
import uvloop
from blockbuster import BlockBuster, BlockBusterFunction

from tests.fakes.pinned_scorer import MISSING

# How long an example takes says more of the machine than of the code. `make soak` tries the same
# properties with many more examples; a test asks for a multiple where they are of many kinds.
hypothesis.settings.register_profile("sidecar", deadline=None, max_examples=15)
hypothesis.settings.register_profile("soak", deadline=None, max_examples=1000)
hypothesis.settings.load_profile("sidecar")

IN_CI = os.environ.get("CI", "").lower() in ("1", "true")
ROOT = Path(__file__).resolve().parent.parent

# Workers take whole files in this order: one that begins late and lasts long is waited for at the
# end. Longest first, those that mostly wait and those that compute in turn, so that at no time all
# workers wait; then everything else as it is collected.
LONG_FIRST = (
    "tests/integrations/test_ray.py",
    "tests/cluster/test_nats.py",
    "tests/web/test_page.py",
    "tests/verdict/test_stalls.py",
    "tests/config/test_deployment.py",
    "tests/cluster/test_faults.py",
    "tests/parity/test_sequences.py",
    "tests/crash/test_named_points.py",
    "tests/test_fault_matrix.py",
    "tests/verdict/test_hunter.py",
    "tests/scoring/test_service.py",
    "tests/verdict/test_replay.py",
    "tests/config/test_slurm_gaps.py",
    "tests/verdict/test_strangers.py",
    "tests/cluster/test_membership_wired.py",
    "tests/web/test_edge_hostile.py",
    "tests/verdict/test_provenance.py",
    "tests/verdict/test_blips.py",
    "tests/verdict/test_tool_loop.py",
    "tests/commands/test_rehearse.py",
    "tests/parity/test_differences_edge.py",
    "tests/retrieval/test_flashrag_process.py",
    "tests/property/test_run_machine.py",
    "tests/retrieval/test_index_build.py",
    "tests/retrieval/test_bm25.py",
    "tests/verdict/test_files.py",
    "tests/web/test_other_clients.py",
    "tests/commands/test_imports.py",
    "tests/reward/test_helper.py",
    "tests/test_soak.py",
)

# Cases by the hundred, generated or swept: their time goes to `make test` and not to `make quick`.
SWEEPS = (
    *("tests/parity/", "tests/property/", "tests/crash/", "tests/test_fault_"),
    *("tests/cluster/test_membership_wired.py", "tests/cluster/test_rewards.py"),
    *("tests/cluster/test_wiring.py", "tests/cluster/test_chaos.py", "tests/run/test_record.py"),
    *("tests/retrieval/test_bm25.py", "tests/retrieval/test_flashrag_served.py"),
    *("tests/retrieval/test_index_build.py", "tests/web/test_edge_hostile.py"),
)

# The audit events of a process that starts; the program is the first value, where there is one.
STARTS = {"subprocess.Popen", "os.posix_spawn", "os.system", "os.fork"}
# A test may ask git about this checkout, and a library the machine for its name, and still be one
# that needs no other process.
NOT_COUNTED = {"git", "uname"}

# Before the first and after the last request: what these call themselves may block. Handlers and
# the writer run in tasks of their own, so nothing that serves is excused by them.
BEFORE_AND_AFTER: dict[str, set[str]] = {
    "smartsearch_sidecar.config.loading": {"load"},
    "smartsearch_sidecar.process.daemon": {"run"},
    "smartsearch_sidecar.retrieval.canaries": {"load"},
}

# A test's stack ends in some thirty frames of pytest, and tens of thousands of calls are judged.
BELOW_EVERY_TEST = {"pytest_asyncio.plugin", "_pytest.python"}

# A sync costs a real disk a millisecond and memory nothing. What the tests write is some 50 MB.
MEMORY = Path("/dev/shm")
MEMORY_BYTES = 2 * 1024**3

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "uvloop": uvloop.new_event_loop,
    "asyncio": asyncio.new_event_loop,
}


def worker() -> tuple[int, int]:
    """Which worker of how many this process is; 0 of 1 without any."""
    name = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    return int(name.removeprefix("gw")), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def pytest_configure() -> None:
    """Temporary folders are in memory, where there is enough and no folder was named.

    Each process that imports aiohttp reads the machine's certificates, in an eighth of a second of
    CPU: those that tests start find none, for nothing here speaks TLS.
    """
    os.environ.setdefault("SSL_CERT_FILE", os.devnull)
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= MEMORY_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_collection_finish() -> None:
    """What collecting has made stays until the end: the garbage collector need not look at it."""
    gc.collect()
    gc.freeze()


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """uvloop, as in production; both where a test is marked ``both_loops``."""
    if item.get_closest_marker("both_loops"):
        return LOOPS
    return {"uvloop": LOOPS["uvloop"]}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collecting makes next to no garbage, so none is looked for meanwhile.

    On a clean clone every worker would compile every file, and all at once the same one: each
    begins elsewhere and finds the rest compiled. What is wrong with a file, pytest itself says.
    """
    gc.disable()
    try:
        number, of = worker()
        files = [file for arg in session.config.args for file in Path(arg).rglob("test_*.py")]
        names = [file.absolute().relative_to(ROOT).with_suffix("").parts for file in sorted(files)]
        first = len(names) * number // of
        for name in names[first:] + names[:first] if of > 1 else ():
            if "benchmarks" not in name:
                with contextlib.suppress(Exception, pytest.skip.Exception):
                    importlib.import_module(".".join(name))
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the sweeps. The longest files come first; the order within a file stays."""
    for item in items:
        if item.nodeid.startswith(SWEEPS):
            item.add_marker(pytest.mark.sweep)
    place = {name: number for number, name in enumerate(LONG_FIRST)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))


class Processes:
    """Programs started and not yet asked for; an audit hook cannot be removed."""

    def __init__(self) -> None:
        self.started: list[str] = []
        sys.addaudithook(self._heard)

    def _heard(self, event: str, values: tuple[object, ...]) -> None:
        if event in STARTS:
            program = str(values[0]) if values else event
            if Path(program).name not in NOT_COUNTED:
                self.started.append(program)


processes = Processes()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """A test without the mark ``process`` that started one would be slow in `make quick`."""
    yield
    started, processes.started = processes.started, []
    if started and not item.get_closest_marker("process"):
        pytest.fail(f"it started {started}: mark it with @pytest.mark.process")


def _detector() -> BlockBuster:
    """Only calls made from the package count: a test may read a file.

    The detector does not know the calls that cost a ledger most, so the two syncs are added to it.
    """
    detector = BlockBuster("smartsearch_sidecar")
    for name in ("fsync", "fdatasync"):
        sync = BlockBusterFunction(os, name, scanned_modules="smartsearch_sidecar")
        detector.functions[f"os.{name}"] = sync
    for call in detector.functions.values():
        call.can_block_predicate = functools.partial(_may_block, call.can_block_predicate)
    return detector


@pytest.fixture(scope="session", autouse=True)
def detector() -> Iterator[BlockBuster]:
    """Watches from the first test to the last: to begin anew with each costs a millisecond."""
    watching = _detector()
    watching.activate()
    yield watching
    watching.deactivate()


def _may_block(library_allows: Callable[..., bool], *args: object, **keys: object) -> bool:
    """Whether a call is free to block, for its callers or for the detector's own reason.

    Nothing of the package calls pytest, so below its frames there is none to look for. The
    detector's own search costs more than most calls that it judges. It compares each frame
    with its lists by the frame's code, and reading that is an event for the audit hook above.
    """
    of_package = False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module in BELOW_EVERY_TEST:
            break
        if module.startswith("smartsearch_sidecar"):
            if frame.f_code.co_name in BEFORE_AND_AFTER.get(module, ()):
                return True
            of_package = True
        frame = frame.f_back
    return not of_package or library_allows(*args, **keys)


@pytest.fixture(autouse=True)
def nothing_blocks_the_loop(
    request: pytest.FixtureRequest, detector: BlockBuster
) -> Iterator[None]:
    """Fails a test in which this package blocks a running event loop."""
    if not request.node.get_closest_marker("may_block"):
        yield
        return
    detector.deactivate()
    yield
    detector.activate()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a skipped test has failed: what it needs is installed there, or it says why not.

    Of a part that passed nobody reads the keywords, and a worker would send some forty of them.
    """
    report = yield
    if report.passed:
        report.keywords = {}
    allowed = hasattr(report, "wasxfail") or item.get_closest_marker("may_skip")
    if IN_CI and report.skipped and not allowed:
        report.outcome = "failed"
        report.longrepr = f"skipped in CI without a may_skip mark: {_reason(report)}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A whole file skipped while it is collected is no better."""
    report = yield
    if IN_CI and report.outcome == "skipped":
        report.outcome = "failed"
        report.longrepr = f"a file was skipped in CI: {report.longrepr}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A run without the pinned scorer prints a warning, with or without a list of skipped tests."""
    for report in terminalreporter.stats.get("skipped", []):
        if isinstance(report, pytest.TestReport) and MISSING in _reason(report):
            terminalreporter.write_line(f"WARNING: {MISSING}", red=True, bold=True)


def _reason(report: pytest.TestReport) -> str:
    longrepr = report.longrepr
    return str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)


@pytest.fixture(scope="session")
def vital_articles() -> Path:
    """The summaries of 10,033 real articles, as `make setup` fetched them."""
    path = ROOT / ".cache" / "vital" / "summaries_en-us.json"
    if not path.is_file():
        pytest.skip("the vital articles are missing: run `make setup`")
    return path
