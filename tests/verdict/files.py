"""What may become of a run's files, done to a directory; and the answers that its journal has."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

Act = Callable[[Path, int], object]


def last_segment(run: Path) -> Path:
    """The file that is written to. Raises ``OSError`` where there is none."""
    segments = sorted((run / "journal").iterdir())
    if not segments:
        raise FileNotFoundError(run / "journal")
    return segments[-1]


def replaced(path: Path) -> None:
    """The same bytes in another file, as a copy tool leaves them."""
    beside = path.with_name("beside")
    shutil.copy2(path, beside)
    beside.rename(path)


def overwritten(path: Path, place: int) -> None:
    """One byte is another, ``place`` bytes before the end; size and file stay."""
    with path.open("r+b") as stream:
        stream.seek(-place, os.SEEK_END)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))


def cut(path: Path, by: int) -> None:
    """The file lacks its last bytes."""
    os.truncate(path, path.stat().st_size - by)


def appended(path: Path, data: bytes) -> None:
    """Another program writes behind what is there."""
    with path.open("ab") as stream:
        stream.write(data)


def cut_to_an_earlier_end(run: Path) -> None:
    """The journal ends where the run was closed before, and no latch lies beside it."""
    path = last_segment(run)
    *lines, _ = path.read_bytes().splitlines(keepends=True)
    while lines and b'"kind":"run.closed"' not in lines[-1]:
        lines.pop()
    if not lines:
        raise FileNotFoundError("it was never closed before")
    path.write_bytes(b"".join(lines))
    (run / "latch.json").unlink(missing_ok=True)


def keep_backup(run: Path) -> None:
    """A copy of the directory beside it, where there is none yet."""
    if not _backup(run).exists():
        shutil.copytree(run, _backup(run))


def _backup(run: Path) -> Path:
    return run.with_name("backup")


def put_back(run: Path) -> None:
    """The copy is put in the directory's place."""
    if not _backup(run).exists():
        raise FileNotFoundError(_backup(run))
    shutil.rmtree(run)
    shutil.copytree(_backup(run), run)


def last_seq(run: Path) -> int:
    """The number of the last whole record, 0 without one."""
    seq = 0
    with contextlib.suppress(OSError):
        for line in last_segment(run).read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                seq = json.loads(line)["seq"]
    return seq


def _remove(name: str) -> Act:
    return lambda run, place: (run / name).unlink()


ACTS: dict[str, Act] = {
    "directory removed": lambda run, place: shutil.rmtree(run),
    "directory renamed": lambda run, place: run.rename(run.with_name("elsewhere")),
    "journal removed": lambda run, place: shutil.rmtree(run / "journal"),
    "segment unlinked": lambda run, place: last_segment(run).unlink(),
    "segment replaced": lambda run, place: replaced(last_segment(run)),
    "segment truncated": lambda run, place: cut(last_segment(run), place),
    "segment cut short": lambda run, place: cut(last_segment(run), place),
    "segment appended to": lambda run, place: appended(last_segment(run), b"x" * place),
    "segment overwritten": lambda run, place: overwritten(last_segment(run), place),
    "claim removed": _remove("claim.json"),
    "claim changed": lambda run, place: overwritten(run / "claim.json", place),
    "claim replaced": lambda run, place: replaced(run / "claim.json"),
    "lock removed": _remove("lock"),
    "lock replaced": lambda run, place: replaced(run / "lock"),
    "room removed": _remove("latch.room"),
    "room replaced": lambda run, place: replaced(run / "latch.room"),
    "latch removed": _remove("latch.json"),
    "history cut": lambda run, place: cut_to_an_earlier_end(run),
    "put back": lambda run, place: put_back(run),
    "latch written by another": lambda run, place: (run / "latch.json").write_bytes(b"{}"),
}

SEEN_BY_READING = frozenset({"segment overwritten"})
"""What a look at the files does not show: a checkpoint reads them."""

MUST_BE_SEEN = frozenset(
    {"journal removed", "segment unlinked", "segment overwritten", "claim removed", "claim changed"}
)
"""What the next life of a run must refuse or find, where it was done while none ran."""


def do(run: Path, act: str, place: int) -> bool:
    """Does it; whether there was anything to do it to."""
    with contextlib.suppress(OSError):
        ACTS[act](run, place)
        return True
    return False


def answers(run: Path) -> list[tuple[int, tuple[str, str]]]:
    """The number of each record of an answer, its query and its text, in order."""
    found: list[tuple[int, tuple[str, str]]] = []
    queries: dict[int, str] = {}
    for segment in sorted((run / "journal").iterdir()):
        for line in segment.read_bytes().splitlines():
            with contextlib.suppress(ValueError):  # the torn end of a journal is no record
                record = json.loads(line)
                if record["kind"] == "retrieval.requested":
                    queries[record["number"]] = record["data"]["query"]
                elif record["kind"] == "retrieval.answered":
                    passages = record["data"]["documents"]
                    text = "\n\n".join(passage["contents"] for passage in passages)
                    found.append((record["seq"], (queries[record["number"]], text)))
    return found
