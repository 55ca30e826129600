"""The files of a run: who may open them, what is durable when, and what a fault leaves."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.file import (
    CLAIM,
    ENDPOINTS,
    JOURNAL,
    LATCH,
    ROOM,
    RunFiles,
    segment_index,
    segment_name,
)
from smartsearch_sidecar.ledger.lock import LOCK, is_locked
from tests.fakes.disk import CountingDisk, CrashingDisk, ForgetfulDisk, FullDisk, ReadOnlyDisk
from tests.fakes.journals import contents
from tests.fakes.raised import raises


def created(directory: Path, **keys: object) -> RunFiles:
    """The files of a new run."""
    files = RunFiles(directory, **keys)  # type: ignore[arg-type]
    files.create()
    return files


def mode(path: Path) -> int:
    """Permission bits."""
    return stat.S_IMODE(path.stat().st_mode)


# --- opening --------------------------------------------------------------------------------------


def test_only_the_owner_can_read_a_run(tmp_path: Path) -> None:
    """Directories are 0700 and files 0600, so other users cannot read queries and passages."""
    files = created(tmp_path / "runs" / "one")
    files.create_only(CLAIM, b"{}")
    files.replace(ENDPOINTS, b"{}")
    files.start_segment(1)
    run = files.directory
    assert (mode(run), mode(run / JOURNAL)) == (0o700, 0o700)
    for name in (CLAIM, ENDPOINTS, LOCK, f"{JOURNAL}/000001.jsonl"):
        assert mode(run / name) == 0o600
    files.close()


def test_existing_directory_is_refused(tmp_path: Path) -> None:
    """A run directory is never shared with what was there, and the message says how to go on."""
    (tmp_path / "run").mkdir()
    with raises(errors.RUN_DIRECTORY, match=r"exists already: name a new one, or .*resume"):
        RunFiles(tmp_path / "run").create()


def test_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """A path through a file ends in a sentence, not in a traceback."""
    (tmp_path / "file").touch()
    with raises(errors.RUN_DIRECTORY, match="cannot be made"):
        RunFiles(tmp_path / "file" / "run").create()


def test_served_directory_says_so(tmp_path: Path) -> None:
    """Whoever takes a directory that is being served is told that it is."""
    files = created(tmp_path / "run")
    with raises(errors.RUN_DIRECTORY, match="being served by another process"):
        RunFiles(tmp_path / "run").create()
    with raises(errors.RUN_DIRECTORY, match="being served by another process"):
        RunFiles(tmp_path / "run").resume()
    files.close()


def test_lock_is_free_again_after_close(tmp_path: Path) -> None:
    """The lock is the process's, not the file's."""
    files = created(tmp_path / "run")
    assert is_locked(tmp_path / "run" / LOCK)
    files.close()
    assert not is_locked(tmp_path / "run" / LOCK)
    again = RunFiles(tmp_path / "run")
    again.resume()
    again.close()


def test_missing_lock_is_free(tmp_path: Path) -> None:
    """A directory without a lock file is not being served."""
    assert not is_locked(tmp_path / LOCK)


def test_a_look_at_the_lock_does_not_take_the_run(tmp_path: Path) -> None:
    """Looking is a shared lock of microseconds: taking the lock waits it out."""
    created(tmp_path / "run").close()
    looking = os.open(tmp_path / "run" / LOCK, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)

    class Looked(CountingDisk):
        def close(self, fd: int) -> None:
            super().close(fd)  # the first try has failed: the shared lock goes now
            fcntl.flock(looking, fcntl.LOCK_UN)

    files = RunFiles(tmp_path / "run", disk=Looked())
    files.resume()
    files.close()
    os.close(looking)


def test_lock_that_was_just_abandoned_is_not_held(tmp_path: Path) -> None:
    """A lock file removed between opening and locking guards nothing, so another one is made."""
    files = created(tmp_path / "run")
    files.create_only(CLAIM, b"{}")
    files.close()
    path = tmp_path / "run" / LOCK

    class Removed(CountingDisk):
        def open(self, path: Path, flags: int) -> int:
            fd = super().open(path, flags)
            self.calls["open"] += 1
            if self.calls["open"] == 1:
                path.unlink()
            return fd

    again = RunFiles(tmp_path / "run", disk=Removed())
    again.lock()
    assert path.exists()
    assert is_locked(path)
    again.close()


# --- a run that never began -----------------------------------------------------------------------


def test_abandoned_run_leaves_nothing(tmp_path: Path) -> None:
    """A start that failed before its claim can be repeated with the same directory."""
    files = created(tmp_path / "run")
    files.abandon()
    assert not (tmp_path / "run").exists()
    created(tmp_path / "run").close()


def test_claimed_run_is_not_abandoned(tmp_path: Path) -> None:
    """Once a run's claim is written, its directory stays, also if the start is abandoned."""
    files = created(tmp_path / "run")
    files.create_only(CLAIM, b"{}")
    files.abandon()
    assert (tmp_path / "run" / CLAIM).read_bytes() == b"{}"
    assert not is_locked(tmp_path / "run" / LOCK)


def test_others_files_are_left_alone(tmp_path: Path) -> None:
    """Abandoning removes what it made, and nothing else."""
    files = created(tmp_path / "run")
    (tmp_path / "run" / "notes").write_text("mine")
    files.abandon()
    assert (tmp_path / "run" / "notes").read_text() == "mine"


# --- resuming -------------------------------------------------------------------------------------


def begun(directory: Path) -> Path:
    """A run with a claim and one segment, not served."""
    files = created(directory)
    files.create_only(CLAIM, b"{}")
    files.start_segment(1)
    files.append(b"one\n", sync=True)
    files.set_room_aside()
    files.close()
    return directory


def test_link_to_a_run_is_refused(tmp_path: Path) -> None:
    """What a link points to can change between a check and a write."""
    begun(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with raises(errors.RUN_DIRECTORY, match="is a link"):
        RunFiles(tmp_path / "link").resume()


@pytest.mark.parametrize("name", [CLAIM, ROOM, JOURNAL, f"{JOURNAL}/000001.jsonl"])
def test_link_inside_a_run_is_refused(tmp_path: Path, name: str) -> None:
    """Neither claim nor journal may lie elsewhere."""
    run = begun(tmp_path / "run")
    (run / name).rename(tmp_path / "elsewhere")
    (run / name).symlink_to(tmp_path / "elsewhere")
    with raises(errors.RUN_DIRECTORY, match="is a link"):
        RunFiles(run).resume()


@pytest.mark.parametrize("name", [".", CLAIM, ROOM, JOURNAL, f"{JOURNAL}/000001.jsonl"])
@pytest.mark.parametrize("bit", [stat.S_IWGRP, stat.S_IWOTH])
def test_what_others_can_write_is_refused(tmp_path: Path, name: str, bit: int) -> None:
    """A ledger that another user could write is refused: its records could not be trusted."""
    run = begun(tmp_path / "run")
    (run / name).chmod(mode(run / name) | bit)
    with raises(errors.RUN_DIRECTORY, match="can be written by others"):
        RunFiles(run).resume()
    assert not is_locked(run / LOCK)  # a refusal holds nothing


def test_other_folder_is_not_taken_for_a_run(tmp_path: Path) -> None:
    """A home directory named by mistake is left as it was, without as much as a lock file."""
    (tmp_path / "thesis.tex").write_text("x")
    tmp_path.chmod(0o700)
    with raises(errors.RUN_DIRECTORY, match=r"not a run directory.*'thesis.tex'"):
        RunFiles(tmp_path).resume()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_missing_directory_is_named(tmp_path: Path) -> None:
    """Resuming nothing is a sentence; whether to begin instead is the caller's."""
    with raises(errors.RUN_DIRECTORY, match="cannot be opened: No such file"):
        RunFiles(tmp_path / "run").resume()


@pytest.mark.parametrize("left", [[], ["lock"], ["lock", "journal"]])
def test_start_that_was_killed_can_be_resumed(tmp_path: Path, left: list[str]) -> None:
    """Every state that ``create`` passes through is one that ``resume`` takes."""
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    for name in left:
        (run / name).mkdir() if name == "journal" else (run / name).touch()
    files = RunFiles(run)
    files.resume()
    assert is_locked(run / LOCK)
    assert (run / JOURNAL).is_dir()
    files.close()


# --- create-only files ----------------------------------------------------------------------------


def test_create_only_never_overwrites(tmp_path: Path) -> None:
    """The first cause wins: a second ``latch.json`` is an error and changes nothing."""
    files = created(tmp_path / "run")
    files.create_only(LATCH, b"first")
    with pytest.raises(FileExistsError):
        files.create_only(LATCH, b"second")
    assert (tmp_path / "run" / LATCH).read_bytes() == b"first"
    files.close()


def test_create_only_follows_no_link(tmp_path: Path) -> None:
    """A link laid in the run's way cannot send a file elsewhere."""
    files = created(tmp_path / "run")
    (tmp_path / "run" / LATCH).symlink_to(tmp_path / "target")
    with pytest.raises(FileExistsError):
        files.create_only(LATCH, b"x")
    assert not (tmp_path / "target").exists()
    files.close()


def test_create_only_is_synced_with_its_name(tmp_path: Path) -> None:
    """Claim and latch survive the machine, and so does every directory above them."""
    disk = ForgetfulDisk(tmp_path)
    files = created(tmp_path / "new" / "deep" / "run", disk=disk)
    files.create_only(CLAIM, b"{}")
    files.close()
    disk.power_loss()
    assert contents(tmp_path) == {"new/deep/run/claim.json": b"{}", "new/deep/run/lock": b""}


def test_latch_leaves_its_name_on_a_full_disk(tmp_path: Path) -> None:
    """Where no byte of the cause fits, the file is there all the same: present means failed."""
    files = created(tmp_path / "run", disk=FullDisk(0))
    with pytest.raises(OSError, match="No space left"):
        files.create_only(LATCH, b"cause")
    assert (tmp_path / "run" / LATCH).read_bytes() == b""
    files.close()


def test_replace_swaps_whole_files(tmp_path: Path) -> None:
    """A reader of ``endpoints.json`` sees the old one or the new one."""
    files = created(tmp_path / "run")
    files.replace(ENDPOINTS, b"old")
    files.replace(ENDPOINTS, b"new")
    assert (tmp_path / "run" / ENDPOINTS).read_bytes() == b"new"
    files.remove(ENDPOINTS)
    files.remove(ENDPOINTS)
    assert not (tmp_path / "run" / ENDPOINTS).exists()
    files.close()


# --- the journal ----------------------------------------------------------------------------------


def test_segment_names_sort_as_they_were_written() -> None:
    """Names and numbers are each other's inverse, and nothing else is a segment."""
    assert segment_name(7) == "000007.jsonl"
    for index in (1, 999_999, 1_000_000):
        assert segment_index(segment_name(index)) == index
    arabic = "\u0660\u0660\u0660\u0660\u0660\u0661.jsonl"
    for name in ("1.jsonl", "000001.jsonl.bak", ".000001.jsonl", "0000001.jsonl", arabic):
        assert segment_index(name) is None


def test_append_is_durable_only_with_its_sync(tmp_path: Path) -> None:
    """What rode no sync may be gone; what rode one is not, nor what was written before it."""
    disk = ForgetfulDisk(tmp_path)
    files = created(tmp_path / "run", disk=disk)
    files.create_only(CLAIM, b"{}")
    files.start_segment(1)
    files.append(b"one\n", sync=False)
    files.append(b"two\n", sync=True)
    files.append(b"three\n", sync=False)
    files.close()
    disk.power_loss()
    assert (tmp_path / "run" / JOURNAL / "000001.jsonl").read_bytes() == b"one\ntwo\n"


def test_old_segment_is_durable_before_the_new_one_begins(tmp_path: Path) -> None:
    """So only the last segment of a journal can be torn."""
    disk = CrashingDisk(tmp_path, "rotate:before", 2)
    files = created(tmp_path / "run", disk=disk)
    files.create_only(CLAIM, b"{}")
    files.start_segment(1)
    files.append(b"one\n", sync=False)
    with pytest.raises(OSError, match="died"):
        files.start_segment(2)
    disk.power_loss()
    assert (tmp_path / "run" / JOURNAL / "000001.jsonl").read_bytes() == b"one\n"


def test_without_sync_nothing_is_synced(tmp_path: Path) -> None:
    """``ledger.sync = false`` is for measurements, and then it is the whole of it."""
    disk = CountingDisk()
    files = created(tmp_path / "run", disk=disk, sync=False)
    files.create_only(CLAIM, b"{}")
    files.start_segment(1)
    files.append(b"one\n", sync=True)
    files.start_segment(2)
    files.close()
    assert disk.calls["sync"] == 0


def test_append_without_a_segment_is_a_fault_of_ours(tmp_path: Path) -> None:
    """A named error, also under ``-O``."""
    files = created(tmp_path / "run")
    with pytest.raises(errors.InvariantBroken):
        files.append(b"x\n", sync=False)
    files.close()


def test_segment_is_continued_where_it_ends(tmp_path: Path) -> None:
    """Trimmed, ended and appended to, all of it durable."""
    run = begun(tmp_path / "run")
    segment = run / JOURNAL / "000001.jsonl"
    segment.write_bytes(b"one\ntwo-torn")
    disk = ForgetfulDisk(tmp_path)
    files = RunFiles(run, disk=disk)
    files.resume()
    files.continue_segment(1, 12, keep=7, newline=True)
    assert (files.segment, files.segment_bytes) == (1, 8)
    files.append(b"three\n", sync=True)
    files.close()
    disk.power_loss()
    assert segment.read_bytes() == b"one\ntwo\nthree\n"


def test_what_a_resume_has_read_is_durable(tmp_path: Path) -> None:
    """Lines that a killed process left unsynced are read back: from then on they must stay."""
    disk = ForgetfulDisk(tmp_path)
    files = created(tmp_path / "run", disk=disk)
    files.create_only(CLAIM, b"{}")
    files.start_segment(1)
    files.append(b"one\ntwo\n", sync=False)
    files.close()
    again = RunFiles(tmp_path / "run", disk=disk)
    again.resume()
    again.continue_segment(1, 8, keep=8, newline=False)
    again.close()
    disk.power_loss()
    assert (tmp_path / "run" / JOURNAL / "000001.jsonl").read_bytes() == b"one\ntwo\n"


def test_segment_that_grew_meanwhile_is_refused(tmp_path: Path) -> None:
    """Something else writes it: nothing is trimmed on the word of an earlier look."""
    run = begun(tmp_path / "run")
    files = RunFiles(run)
    files.resume()
    with raises(errors.RUN_DIRECTORY, match="changed while it was read"):
        files.continue_segment(1, 3, keep=0, newline=False)
    assert (run / JOURNAL / "000001.jsonl").read_bytes() == b"one\n"
    files.close()


# --- torn tails -----------------------------------------------------------------------------------


def test_tail_is_set_aside_once(tmp_path: Path) -> None:
    """The same tail found again after a crash uses the same copy; another tail gets its own."""
    files = created(tmp_path / "run")
    first = files.set_aside(1, 40, b"torn")
    assert first.name == "torn-000001-40.bin"
    assert files.set_aside(1, 40, b"torn") == first
    second = files.set_aside(1, 40, b"torn otherwise")
    assert (second.name, second.read_bytes()) == ("torn-000001-40-2.bin", b"torn otherwise")
    assert first.read_bytes() == b"torn"
    files.close()


def test_tail_that_cannot_be_kept_is_not_trimmed(tmp_path: Path) -> None:
    """Where the copy fails the caller gets the error, before anything was cut."""
    run = begun(tmp_path / "run")
    disk = ReadOnlyDisk()
    files = RunFiles(run, disk=disk)
    files.resume()
    disk.read_only = True
    with pytest.raises(OSError, match="Read-only") as caught:
        files.set_aside(1, 0, b"one\n")
    assert caught.value.errno == errno.EROFS
    files.close()
