"""The scorer's source is trusted only while it is the pinned one, and nothing of it is executed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.reward.source import (
    PINNED,
    SOURCE_BYTES_MAX,
    Pin,
    VerifiedSource,
    verify_checkout,
    verify_file,
)
from tests.fakes.raised import raises

FAKE = Path(__file__).parents[1] / "fakes" / "scorer_source.py"
RELATIVE = "src/reward/scorer.py"
SHA256 = hashlib.sha256(FAKE.read_bytes()).hexdigest()


def git(root: Path, *words: str) -> str:
    author = ["-c", "user.name=tester", "-c", "user.email=tester@example.invalid"]
    done = subprocess.run(
        ["git", "-C", str(root), *author, *words],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"], "HOME": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"},
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / 'check "out'
    (root / RELATIVE).parent.mkdir(parents=True)
    shutil.copy(FAKE, root / RELATIVE)
    (root / "train.py").write_text("lr = 1\n")
    (root / ".gitignore").write_text("*.log\n")
    (root / ".gitattributes").write_text("*.py filter=loud\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "trainer")
    return root


def pin_of(root: Path) -> Pin:
    return Pin(commit=git(root, "rev-parse", "HEAD"), path=RELATIVE, sha256=SHA256)


def test_a_clean_checkout_is_taken(checkout: Path) -> None:
    """A clean checkout at the pin must give the file's bytes and facts that JSON can hold."""
    (checkout / "train.log").write_text("ignored files are not changes")
    source = verify_checkout(checkout, pin=pin_of(checkout))
    assert source.text == FAKE.read_bytes()
    assert json.loads(json.dumps(source.binding)) == {
        "kind": "checkout",
        "root": str(checkout),
        "head": pin_of(checkout).commit,
        "clean": True,
        "path": RELATIVE,
        "sha256": SHA256,
    }
    source.recheck()
    assert "compute_score" not in repr(source)


def test_the_pin_is_the_trainers() -> None:
    """The default pin must be the commit and digest the design names."""
    assert PINNED.commit == "5e9e7ec0d6af34f45fad145d4bff442529e7e6ff"
    assert PINNED.path == "src/verl/utils/reward_score/re_call.py"
    assert PINNED.sha256 == "2697ffa7479a0c9c4e6baf843164b7055b80350c627e01413584ecf4f76476bc"


def _other_commit(root: Path) -> None:
    git(root, "commit", "-q", "--allow-empty", "-m", "one more")


def _modify(root: Path) -> None:
    (root / "train.py").write_text("lr = 2\n")


def _stage(root: Path) -> None:
    _modify(root)
    git(root, "add", "-A")


def _delete(root: Path) -> None:
    (root / "train.py").unlink()


def _add(root: Path) -> None:
    (root / "sitecustomize.py").write_text("import this\n")


def _hide(root: Path) -> None:
    """A change of the scorer that ``git status`` was told not to see."""
    git(root, "update-index", "--assume-unchanged", RELATIVE)
    (root / RELATIVE).write_bytes(FAKE.read_bytes() + b"\n")


def _no_repository(root: Path) -> None:
    shutil.rmtree(root / ".git")


def _link_file(root: Path) -> None:
    git(root, "update-index", "--assume-unchanged", RELATIVE)
    (root / RELATIVE).unlink()
    (root / RELATIVE).symlink_to(FAKE)


def _link_folder(root: Path) -> None:
    git(root, "update-index", "--assume-unchanged", RELATIVE)
    (root / "src").rename(root.parent / "elsewhere")
    (root / "src").symlink_to(root.parent / "elsewhere")
    (root / ".git" / "info").mkdir(exist_ok=True)
    (root / ".git" / "info" / "exclude").write_text("src\n")


@pytest.mark.parametrize(
    "change, said",
    [
        (_other_commit, "check out"),
        (_modify, r"not clean.*train\.py"),
        (_stage, r"not clean.*train\.py"),
        (_delete, r"not clean.*train\.py"),
        (_add, r"not clean.*sitecustomize\.py"),
        (_hide, "sha256"),
        (_no_repository, "not a git repository"),
        (_link_file, "symbolic link"),
        (_link_folder, "symbolic link"),
    ],
)
def test_another_checkout_is_refused(
    checkout: Path, change: Callable[[Path], None], said: str
) -> None:
    """A checkout that is not exactly the pinned one must be refused with what differs."""
    pin = pin_of(checkout)
    change(checkout)
    with pytest.raises(errors.ScorerSourceError, match=said):
        verify_checkout(checkout, pin=pin)


def test_only_the_root_itself_is_taken(checkout: Path, tmp_path: Path) -> None:
    """A folder inside a checkout, a link to one, a file and nothing at all must be refused."""
    link = tmp_path / "link"
    link.symlink_to(checkout)
    for path in (checkout / "src", link, checkout / "train.py", tmp_path / "absent"):
        with pytest.raises(errors.ScorerSourceError):
            verify_checkout(path, pin=pin_of(checkout))


def test_a_work_tree_elsewhere_is_refused(checkout: Path, tmp_path: Path) -> None:
    """A configuration that points git at another tree must not let this one pass as clean."""
    pin = pin_of(checkout)
    other = tmp_path / "other"
    git(checkout, "worktree", "add", "-q", "--detach", str(other))
    _modify(checkout)
    git(checkout, "config", "core.worktree", str(other))
    with pytest.raises(errors.ScorerSourceError, match="not the root"):
        verify_checkout(checkout, pin=pin)


def test_nothing_of_the_checkout_is_executed(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that the configuration of checkout or user names must not run."""
    ran, home = tmp_path / "ran", tmp_path / "home"
    home.mkdir()
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho \"$0 $1\" >> '{ran}'\ncat\n")
    program.chmod(0o755)
    (home / ".gitconfig").write_text(f"[core]\n\tfsmonitor = {program}\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(home / ".gitconfig"))
    pin = pin_of(checkout)
    for key in ("core.fsmonitor", "filter.loud.clean", "filter.loud.process", "filter.a.b.clean"):
        git(checkout, "config", key, str(program))
    git(checkout, "config", "filter.loud.required", "true")
    hook = checkout / ".git" / "hooks" / "post-index-change"
    hook.parent.mkdir(exist_ok=True)
    shutil.copy(program, hook)
    # A changed time makes git read the file again, through the filter.
    os.utime(checkout / RELATIVE, (1, 1))
    verify_checkout(checkout, pin=pin)
    assert not ran.exists()
    subprocess.run(["git", "-C", str(checkout), "status"], capture_output=True, check=False)
    assert ran.exists(), "the trap must work, or this test could not fail"


def test_a_filter_that_cannot_be_switched_off_is_refused(checkout: Path) -> None:
    """A filter whose name no option can carry must be refused rather than run."""
    pin = pin_of(checkout)
    git(checkout, "config", "filter.a=b.clean", "cat")
    with pytest.raises(errors.ScorerSourceError, match="filter"):
        verify_checkout(checkout, pin=pin)


@pytest.mark.may_skip("giving a file away takes root")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a checkout to another user")
def test_another_owners_checkout_works(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout that another user owns must be verified like our own."""
    pin = pin_of(checkout)
    for path in (checkout, *checkout.rglob("*")):
        os.chown(path, 12345, 12345, follow_symlinks=False)
    monkeypatch.delenv("SUDO_UID", raising=False)
    refused = subprocess.run(
        ["git", "-C", str(checkout), "status"],
        capture_output=True,
        check=False,
        env={"PATH": os.defpath, "HOME": str(checkout)},
    )
    assert b"ownership" in refused.stderr, "the trap must work, or this test could not fail"
    assert verify_checkout(checkout, pin=pin).sha256 == SHA256


def test_without_git_the_sentence_names_the_other_way(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without git must be told about the single file."""
    pin = pin_of(checkout)
    monkeypatch.setenv("PATH", str(checkout))
    with pytest.raises(errors.ScorerSourceError, match="source_sha256"):
        verify_checkout(checkout, pin=pin)


# --- one file -------------------------------------------------------------------------------------


@pytest.fixture
def single(tmp_path: Path) -> VerifiedSource:
    path = tmp_path / "mounted" / "scorer.py"
    path.parent.mkdir()
    shutil.copy(FAKE, path)
    return verify_file(path, SHA256)


def test_one_file_is_pinned_by_its_digest(single: VerifiedSource) -> None:
    """One file with the declared digest must be enough."""
    single.recheck()
    assert single.text == FAKE.read_bytes()
    assert single.binding == {"kind": "file", "path": str(single.path), "sha256": SHA256}


@pytest.mark.parametrize("digest", ["0" * 64, SHA256.upper(), SHA256[:-1], f"{SHA256}\n", ""])
def test_another_digest_is_refused(single: VerifiedSource, digest: str) -> None:
    """A digest that differs or is not one must be refused."""
    with pytest.raises(errors.ScorerSourceError, match="sha256"):
        verify_file(single.path, digest)


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    """A link, a folder, a pipe, an oversized file and nothing at all must be refused at once."""
    big = bytes(SOURCE_BYTES_MAX + 1)
    (tmp_path / "link").symlink_to(FAKE)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "big").write_bytes(big)
    for name in ("link", "pipe", "", "absent"):
        with pytest.raises(errors.ScorerSourceError):
            verify_file(tmp_path / name, SHA256)
    with pytest.raises(errors.ScorerSourceError, match="at most"):
        verify_file(tmp_path / "big", hashlib.sha256(big).hexdigest())


# --- while it is in use ---------------------------------------------------------------------------


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\n")


def _same_size(path: Path) -> None:
    """Another byte with the same length and times: only reading finds it."""
    facts = path.stat()
    path.write_bytes(path.read_bytes().replace(b"0.125", b"0.625", 1))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def _link_away(path: Path) -> None:
    path.unlink()
    path.symlink_to(FAKE)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("change", [_append, _same_size, _link_away, _folder, Path.unlink])
def test_changed_bytes_are_noticed(single: VerifiedSource, change: Callable[[Path], None]) -> None:
    """Any change of the file after loading must fail the next check."""
    change(single.path)
    with raises(errors.SOURCE_CHANGED):
        single.recheck()


def test_a_link_put_into_the_checkout_is_noticed(checkout: Path, tmp_path: Path) -> None:
    """A folder replaced by a link must fail the next check, also if its contents are the same."""
    source = verify_checkout(checkout, pin=pin_of(checkout))
    (checkout / "src").rename(tmp_path / "elsewhere")
    (checkout / "src").symlink_to(tmp_path / "elsewhere")
    with raises(errors.SOURCE_CHANGED):
        source.recheck()


def test_restored_bytes_are_the_source_again(single: VerifiedSource) -> None:
    """The check must compare bytes, not remember that it once failed."""
    _append(single.path)
    with raises(errors.SOURCE_CHANGED):
        single.recheck()
    shutil.copy(FAKE, single.path)
    single.recheck()


def test_a_run_may_not_overlap_the_source(
    checkout: Path, single: VerifiedSource, tmp_path: Path
) -> None:
    """A run directory around, inside or at the source must be refused, through links too."""
    whole = verify_checkout(checkout, pin=pin_of(checkout))
    link = tmp_path / "link"
    link.symlink_to(checkout)
    for run in (checkout, checkout / "runs" / "1", tmp_path, link / "runs", checkout / ".." / "."):
        with raises(errors.RUN_DIRECTORY, match="overlaps"):
            whole.refuse_overlap(run)
    with raises(errors.RUN_DIRECTORY):
        single.refuse_overlap(single.path.parent)
    whole.refuse_overlap(tmp_path / "runs")
    single.refuse_overlap(single.path.parent / "runs")
