"""A small journal cut and changed at every byte: refused or torn, never another history."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.file import LATCH, RunFiles
from smartsearch_sidecar.ledger.reader import History, RunReader, Scan, Segment
from smartsearch_sidecar.ledger.recovery import Ending, Reopened, Verdict, judge, observe, reopen
from tests.fakes.journals import Written, answered, latched, requested, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Few bytes: a claim, a search, its answer, and the latch as the last record."""
    documents = [{"id": "1", "contents": "é\n", "score": 0.5}]
    return write_run(
        tmp_path_factory.mktemp("small") / "run",
        [requested(1, "a"), answered(1, "a", documents), latched("operator")],
    )


class Held(RunReader):
    """A journal of one segment that lies in memory."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def segments(self) -> tuple[Segment, ...]:
        return (Segment(1, len(self.data)),)

    def chunks(self, segment: Segment, offset: int = 0) -> Iterator[bytes]:
        for at in range(offset, segment.size, 1000):
            yield self.data[at : at + 1000]


@dataclass
class Found:
    """What some bytes come to: the verdict, the history read, and the bytes that stay."""

    verdict: Verdict
    history: History
    kept: bytes


def read(run: Written, data: bytes) -> Found:
    """Reads bytes as the run's journal."""
    scan = Scan(Held(data), History(run.claim))
    scan.drain()
    verdict = judge(observe(scan, None, begun=False))
    kept = data
    if scan.end is not None and verdict.ending is Ending.TORN:
        kept = data[: scan.place.offset + scan.end.keep]
    if scan.end is not None and scan.end.newline:
        kept += b"\n"
    return Found(verdict, scan.history, kept)


def is_prefix(run: Written, found: Found) -> None:
    """What was found is the run's own history up to some record, and nothing else."""
    seq = found.history.seq
    assert found.history.head == run.heads[seq]
    assert found.history.state == run.state(seq)
    assert found.kept == b"".join(run.lines[:seq])


def changed_bytes(run: Written) -> Iterator[tuple[int, bytes]]:
    """Every byte of the journal as another one: a bit, a NUL, a line's end, a quote."""
    data = b"".join(run.lines)
    for offset, byte in enumerate(data):
        for value in {byte ^ 0x01, byte ^ 0x80, 0, ord("\n"), ord('"')} - {byte}:
            yield offset, data[:offset] + bytes([value]) + data[offset + 1 :]


def test_every_cut_is_a_prefix_or_torn(run: Written) -> None:
    """Cut anywhere, a journal is the earlier history that its whole lines tell."""
    data = b"".join(run.lines)
    ends = list(itertools.accumulate(map(len, run.lines)))
    for size in range(len(data)):
        found = read(run, data[:size])
        is_prefix(run, found)
        assert found.history.seq == sum(end <= size + 1 for end in ends)  # a newline may be missing
        at_boundary = size in (0, *ends) or size + 1 in ends
        wanted = Ending.CLEAN if at_boundary else Ending.TORN
        assert found.verdict.ending is wanted


def test_every_changed_byte_is_refused_or_torn(run: Written) -> None:
    """Whatever byte changes, no history is read that was not written: at most the last is lost."""
    last = sum(map(len, run.lines[:-1]))
    actions = set()
    for offset, data in changed_bytes(run):
        found = read(run, data)
        actions.add(found.verdict.ending)
        if found.verdict.ending is not Ending.CORRUPT:
            assert offset >= last
            is_prefix(run, found)
    # A newline that became NUL is a whole line before a tail of NULs: kept, and the NUL trimmed.
    assert actions == {Ending.CORRUPT, Ending.TORN}


def test_every_cut_before_a_later_segment_is_refused(run: Written) -> None:
    """A segment that another follows was on the medium: no crash has shortened it."""

    class Two(Held):
        def segments(self) -> tuple[Segment, ...]:
            return (Segment(1, len(self.data)), Segment(2, 0))

    data = b"".join(run.lines)
    ends = list(itertools.accumulate(map(len, run.lines)))
    for size in range(len(data)):
        scan = Scan(Two(data[:size]), History(run.claim))
        scan.drain()
        assert (scan.problem is None) == (size in ends), size


def reopened(directory: Path) -> Reopened:
    """Reopens without waiting for the medium: this is done some hundred times."""
    files = RunFiles(directory, sync=False)
    files.resume()
    try:
        return reopen(files)
    finally:
        files.close()


def test_files_follow_the_verdict(run: Written) -> None:
    """On the disk the same: refused with nothing touched, or exactly the prefix is left."""
    whole = b"".join(run.lines)
    cuts = [whole[:size] for size in range(0, len(whole), 11)]
    changes = [data for _, data in itertools.islice(changed_bytes(run), 0, None, 23)]
    for data in (*cuts, *changes, whole[:-1], whole + bytes(9)):
        run.segment.write_bytes(data)
        wanted = read(run, data)
        try:
            found = reopened(run.directory)
        except errors.LedgerCorrupt:
            assert wanted.verdict.ending is Ending.CORRUPT
            assert run.segment.read_bytes() == data
            assert len(list(run.directory.iterdir())) == 3
            continue
        assert wanted.verdict.ending is not Ending.CORRUPT
        assert (found.head, found.state) == (wanted.history.head, wanted.history.state)
        assert run.segment.read_bytes() == wanted.kept
        for leftover in (*run.directory.glob("torn-*"), run.directory / LATCH):
            leftover.unlink(missing_ok=True)
