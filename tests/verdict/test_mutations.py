"""Thousands of single changes of journal, claim, latch and receipt: refused, or read as they are.

Each change is one that a disk, a person or a program could make: bytes flipped, cut, inserted or
repeated, lines repeated or swapped, keys removed, values changed, with the sum as it was, with the
line's own sum made right, or with the whole rest of the journal forged to fit. What is accepted all
the same is held against a reading of the same bytes by the standard library alone.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.file import CLAIM, JOURNAL, LATCH, RunFiles
from smartsearch_sidecar.ledger.receipt import CheckpointReceipt
from smartsearch_sidecar.ledger.recovery import reopen
from smartsearch_sidecar.ledger.verify import verify
from smartsearch_sidecar.run.record import record_of
from smartsearch_sidecar.run.state import RunState
from tests.fakes.journals import closed, resumed, searches, write_run
from tests.fakes.soaked import soaked

JOURNALS = Path(__file__).parent.parent / "data" / "journals"
EACH = 100  # changes a seed
SUM = b',"sum":"'
KEYS = ("seq", "at", "prev", "kind", "number", "data", "sum")


# --- what is changed ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Original:
    """A run as it was written, and the last receipt it gave; ``failed`` where it is latched."""

    directory: Path
    receipt: bytes
    failed: bool

    @property
    def segments(self) -> list[Path]:
        return sorted((self.directory / JOURNAL).iterdir())


def receipt_of(directory: Path) -> bytes:
    """The receipt of the last checkpoint that a run accepted."""
    accepted: Any = None
    for segment in sorted((directory / JOURNAL).iterdir()):
        for raw in segment.read_bytes().splitlines():
            line = json.loads(raw)
            if line["kind"] == "checkpoint.accepted":
                accepted = line
    claim = hashlib.sha256((directory / CLAIM).read_bytes()).hexdigest()
    value = {"format": 1, "accepted": True, "number": accepted["number"], **accepted["data"]}
    value |= {"seq": accepted["seq"], "head": accepted["sum"], "claim_sha256": claim}
    return json.dumps(value, indent=1).encode()


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[Original]:
    """Two failed runs of an earlier version, and one in segments that ended well."""
    folder = tmp_path_factory.mktemp("originals")
    found = []
    for name in ("searches", "rewards"):
        shutil.copytree(JOURNALS / name, folder / name)
        (folder / name / "lock").touch()
        receipt = (JOURNALS / f"{name}.receipt.json").read_bytes()
        found.append(Original(folder / name, receipt, failed=True))
    counts = {"retrieval_attempts": 3, "retrieval_responses": 3}
    values = {"step": 1, "path": "ckpt", "manifest_sha256": "e" * 64, "occurrence": 1}
    accepted = ("checkpoint.accepted", 1, {**values, "usage": counts, "read_back_bytes": 12})
    events = [*searches(2), closed(2), resumed(), *searches(1, first=3), accepted, closed(3)]
    write_run(folder / "healthy", events, per_segment=4)
    found.append(Original(folder / "healthy", receipt_of(folder / "healthy"), failed=False))
    return found


def flip(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def overwrite(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + rng.choice([b"\0", b"\n", b'"', b"}", b"0", b" "]) + data[at + 1 :]


def cut_out(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.randint(1, 40) :]


def cut_off(rng: random.Random, data: bytes) -> bytes:
    ends = [at + 1 for at, byte in enumerate(data) if byte == 10]
    return data[: rng.choice([rng.randrange(len(data)), rng.choice(ends or [0])])]


def insert(rng: random.Random, data: bytes) -> bytes:
    at = rng.choice([rng.randrange(len(data)), len(data)])
    more = rng.choice([rng.randbytes(rng.randint(1, 9)), b"\n", b"\0\0\0", b"{}", b"{}\n", b" "])
    return data[:at] + more + data[at:]


def repeat(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at : at + rng.randint(1, 60)] + data[at:]


def lines_of(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True)


def repeat_line(rng: random.Random, data: bytes) -> bytes:
    lines = lines_of(data)
    line = rng.choice(lines)
    lines.insert(rng.randint(0, len(lines)), line)
    return b"".join(lines)


def swap_lines(rng: random.Random, data: bytes) -> bytes:
    lines = lines_of(data)
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


def drop_line(rng: random.Random, data: bytes) -> bytes:
    lines = lines_of(data)
    lines.pop(rng.randrange(len(lines)))
    return b"".join(lines)


Change = Callable[[random.Random, bytes], bytes]
BYTES: tuple[Change, ...] = (flip, overwrite, cut_out, cut_off, insert, repeat)
LINES: tuple[Change, ...] = (*BYTES, repeat_line, swap_lines, drop_line)

OTHER_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, -1, 99, 1.0, 1.5, 2**70, "", "x", "0" * 64, [], {}),
    *([1], {"a": 1}, "other", "train", "2026-12-02T19:25:28.000000Z", "run.closed"),
)


def places_of(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key and item of a JSON value, as paths."""
    children: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    found = []
    for key, child in children:
        found += [(*before, key), *places_of(child, (*before, key))]
    return found


def changed_value(rng: random.Random, value: Any) -> Any:
    """The value with one key or item removed, changed, renamed or added."""
    value = copy.deepcopy(value)
    *path, last = rng.choice(places_of(value))
    inside = value
    for key in path:
        inside = inside[key]
    match rng.randrange(4):
        case 0:
            del inside[last]
        case 1 if isinstance(inside, dict):
            inside["another"] = inside.pop(last)
        case 2 if isinstance(inside, dict):
            inside["another"] = rng.choice(OTHER_VALUES)
        case _:
            old = inside[last]
            near = [old + 1, old - 1] if type(old) is int else [f"{old}x"]
            inside[last] = rng.choice([*near, *OTHER_VALUES])
    return value


def encoded(value: Any) -> bytes:
    """As the writer encodes it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def summed(value: dict[str, Any]) -> bytes:
    """A record as a line whose sum is right for it."""
    body = encoded({key: item for key, item in value.items() if key != "sum"})[:-1]
    return body + SUM + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def change_record(rng: random.Random, lines: list[bytes]) -> list[bytes]:
    """One value in one record is another: its sum is wrong, or right, or all that follow fit."""
    at = rng.randrange(len(lines))
    fix = rng.choice(["none", "line", "chain"])
    value = changed_value(rng, json.loads(lines[at]))
    if fix == "none":
        return [*lines[:at], encoded(value) + b"\n", *lines[at + 1 :]]
    found = [*lines[:at], summed(value)]
    for line in lines[at + 1 :]:
        following = json.loads(line)
        if fix == "chain":
            following["prev"] = json.loads(found[-1])["sum"]
        found.append(summed(following))
    return found


def change_journal(rng: random.Random, run: Path) -> None:
    segments = sorted((run / JOURNAL).iterdir())
    if rng.random() < 0.4:
        parts = [lines_of(segment.read_bytes()) for segment in segments]
        lines = change_record(rng, [line for part in parts for line in part])
        for segment, part in zip(segments, parts, strict=True):
            segment.write_bytes(b"".join(lines[: len(part)]))
            lines = lines[len(part) :]
    elif rng.random() < 0.1 and len(segments) > 1:
        rng.choice(segments).unlink()
    else:
        segment = rng.choice(segments)
        segment.write_bytes(rng.choice(LINES)(rng, segment.read_bytes()))


def forge_claim(run: Path, claim: Any) -> None:
    """Another claim, and a journal that chains to it."""
    (run / CLAIM).write_bytes(json.dumps(claim, indent=2).encode())
    before = hashlib.sha256((run / CLAIM).read_bytes()).hexdigest()
    for segment in sorted((run / JOURNAL).iterdir()):
        found = []
        for line in lines_of(segment.read_bytes()):
            value = json.loads(line)
            value["prev"] = before
            if value["kind"] == "run.claimed":
                value["data"]["claim_sha256"] = before
            found.append(summed(value))
            before = json.loads(found[-1])["sum"]
        segment.write_bytes(b"".join(found))


def change_json(rng: random.Random, data: bytes) -> bytes:
    """Bytes, or one value in it; or the same value in other bytes."""
    if rng.random() < 0.4:
        return rng.choice(BYTES)(rng, data)
    if rng.random() < 0.1:
        return json.dumps(json.loads(data), indent=rng.randint(3, 5)).encode()
    return encoded(changed_value(rng, json.loads(data))) + b"\n"


# --- how it is read without the package -----------------------------------------------------------


@dataclass
class Plain:
    """What a journal says, read line by line up to the first that is no record of it."""

    state: RunState
    seq: int
    head: str
    rest: bytes


def plainly(run: Path) -> Plain:
    """Reads with the standard library's JSON and digest; the fold alone is the package's."""
    data = b"".join(path.read_bytes() for path in sorted((run / JOURNAL).iterdir()))
    head = hashlib.sha256((run / CLAIM).read_bytes()).hexdigest()
    found = Plain(RunState(), 0, head, data)
    while found.rest:
        piece, newline, rest = found.rest.partition(b"\n")
        body, _, end = (piece if newline else piece.rstrip(b"\0")).rpartition(SUM)
        total = hashlib.sha256(body).hexdigest()
        if end != total.encode() + b'"}':
            break
        line = json.loads(body + SUM + end)
        shape = tuple(line) == KEYS and type(line["kind"]) is str and type(line["data"]) is dict
        if not shape or (line["seq"], line["prev"]) != (found.seq + 1, found.head):
            break
        line["data"].pop("documents", None)  # the sum covers them, and no state holds them
        try:
            found.state.fold(record_of(line["kind"], line["number"], line["data"]))
        except errors.LedgerCorrupt:
            break
        found.seq, found.head, found.rest = line["seq"], total, rest
    return found


def parsed(data: bytes) -> Any:
    """The JSON, or a value that equals no other."""
    try:
        return json.loads(data)
    except ValueError:
        return object()


def exactly(one: Any, other: Any) -> bool:
    """Equal as JSON, where ``1`` is neither ``true`` nor ``1.0``."""
    return repr(one) == repr(other) or (
        isinstance(one, dict)
        and isinstance(other, dict)
        and one.keys() == other.keys()
        and all(exactly(one[key], other[key]) for key in one)
    )


# --- what must hold -------------------------------------------------------------------------------


def prefix(run: Path, receipt: bytes) -> bytes:
    """The journal's bytes up to the record that a receipt names."""
    head = json.loads(receipt)["head"].encode()
    data = b"".join(path.read_bytes() for path in sorted((run / JOURNAL).iterdir()))
    return data[: data.index(SUM + head) + len(SUM) + 64]


def hold_verification(original: Original, run: Path, receipt: bytes, *, what: str) -> bool:
    """Whether it was accepted; then everything said of it is what the bytes say."""
    try:
        given = CheckpointReceipt.parse(receipt)
    except errors.UsageError:
        return False
    found = verify(run, receipt=given)
    if not found.ok:
        return False
    assert (run / CLAIM).read_bytes() == (original.directory / CLAIM).read_bytes()
    assert exactly(parsed(receipt), parsed(original.receipt))
    assert prefix(run, receipt) == prefix(original.directory, original.receipt)
    plain = plainly(run)
    assert plain.rest == b""
    assert (found.seq, found.head, found.state) == (plain.seq, plain.head, plain.state)
    assert (found.cause is not None) == original.failed
    if what == "latch":
        assert plain.state == plainly(original.directory).state
        assert found.cause == plain.state.cause
    return True


def hold_resume(original: Original, run: Path, *, what: str) -> None:
    """Without a receipt: refused, or the records that are whole, and as failed as it was."""
    plain = plainly(run) if (run / CLAIM).exists() else None
    files = RunFiles(run)
    try:
        files.resume()
        found = reopen(files)
    except errors.SidecarError:
        return
    finally:
        files.close()
    assert plain is not None
    assert (found.seq, found.state) == (plain.seq, plain.state)
    assert b"\n" not in plain.rest.rstrip(b"\n")  # trimmed is the last piece alone
    if what in ("latch", "receipt", "claim"):
        failed = found.state.closed or found.cause("latch", judged=True) is not None
        assert failed == original.failed
    elif original.failed:
        assert found.state.closed or found.latched is not None


@pytest.mark.parametrize("seed", [0, 1, *soaked(range(2, 100))])
def test_single_changes(originals: list[Original], tmp_path: Path, seed: int) -> None:
    """None is read as another history, opens a latch or passes for another receipt."""
    rng = random.Random(seed)
    counts = {"accepted": 0, "refused": 0}
    for number in range(EACH):
        original = rng.choice(originals)
        run = tmp_path / str(number)
        shutil.copytree(original.directory, run)
        receipt = original.receipt
        what = rng.choice(["journal", "journal", "claim", "receipt", "latch"])
        if what == "latch" and not original.failed:
            what = "journal"
        if what == "journal":
            change_journal(rng, run)
        elif what == "receipt":
            receipt = change_json(rng, receipt)
        elif what == "claim" and rng.random() < 0.3:
            forge_claim(run, changed_value(rng, json.loads((run / CLAIM).read_bytes())))
        elif what == "latch" and rng.random() < 0.05:
            (run / LATCH).unlink()
        else:
            file = run / (CLAIM if what == "claim" else LATCH)
            file.write_bytes(change_json(rng, file.read_bytes()))
        accepted = hold_verification(original, run, receipt, what=what)
        counts["accepted" if accepted else "refused"] += 1
        hold_resume(original, run, what=what)
        shutil.rmtree(run)
    assert counts["refused"] > counts["accepted"]
