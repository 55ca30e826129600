"""The pinned scorer's source: which bytes they are, and that they still are those.

The operator mounts a checkout of the pinned trainer (or one file of it); this module decides
whether to trust it. Nothing of the checkout is executed here: its git configuration may name
programs (a file system monitor, hooks, content filters), and each of those is switched off.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smartsearch_sidecar import errors
from smartsearch_sidecar.run.json_values import is_sha256

GIT_SECONDS = 60.0  # a status of a few thousand files on a cold network mount; longer: it hangs
SOURCE_BYTES_MAX = 1 << 20  # the pinned scorer is 9 KB; a megabyte is another file


@dataclass(frozen=True)
class Pin:
    """What a checkout must be."""

    commit: str  # the full commit id (40 hex digits) HEAD must have
    path: str  # the scorer's file, relative to the root, with ``/``
    sha256: str


PINNED = Pin(
    commit="5e9e7ec0d6af34f45fad145d4bff442529e7e6ff",
    path="src/verl/utils/reward_score/re_call.py",
    sha256="2697ffa7479a0c9c4e6baf843164b7055b80350c627e01413584ecf4f76476bc",
)
"""RUC-NLPIR/SmartSearch, the trainer this sidecar is made for."""


@dataclass(frozen=True)
class VerifiedSource:
    """Bytes whose digest was what it had to be when they were read."""

    path: Path
    sha256: str
    text: bytes = field(repr=False)
    """The file's bytes; what is compiled is exactly this, never a second read."""
    root: Path  # what a run directory may not overlap: the checkout, or the file itself
    binding: Mapping[str, Any]
    """JSON facts for the run's claim (``kind``, ``path``, ``sha256``; of a checkout also ``root``,
    ``head``, ``clean``)."""

    def recheck(self) -> None:
        """Reads the file again and compares digests; raises ``SOURCE_CHANGED``."""
        try:
            _refuse_links(self.root, self.path)
            found = hashlib.sha256(_read(self.path)).hexdigest()
        except (OSError, errors.ScorerSourceError) as error:
            raise errors.SOURCE_CHANGED(
                f"the scorer's source {self.path} can no longer be read "
                f"({type(error).__name__}); leave it alone while a run is served"
            ) from error
        if found != self.sha256:
            raise errors.SOURCE_CHANGED(
                f"the scorer's source {self.path} changed while the run was served: "
                f"loaded with sha256 {self.sha256}, now {found}"
            )

    def refuse_overlap(self, run_directory: Path) -> None:
        """Refuses a run directory that overlaps: a run would then change what was verified."""
        run, root = run_directory.resolve(), self.root.resolve()
        if run.is_relative_to(root) or root.is_relative_to(run):
            raise errors.RUN_DIRECTORY(
                f"the run directory {run} overlaps the scorer's source {root}; "
                "choose one outside of it"
            )


def verify_checkout(checkout: Path, *, pin: Pin = PINNED) -> VerifiedSource:
    """Verifies a checkout of the trainer: HEAD, a clean tree, no links, the digest.

    ``checkout`` is the root of the work tree; it may belong to another user. Raises
    ``ScorerSourceError``: the sentence says what differs from ``pin`` and what to do.
    """
    if checkout.is_symlink() or not checkout.is_dir():
        raise errors.SCORER_SOURCE(
            f"reward.checkout {checkout} is not a directory (links are refused); "
            "name the root of the checkout itself"
        )
    root = checkout.resolve()
    git = _Git(root)
    if Path(git.run("rev-parse", "--show-toplevel").rstrip("\n")).resolve() != root:
        raise errors.SCORER_SOURCE(
            f"reward.checkout {root} is not the root of its work tree; name the root"
        )
    head = git.run("rev-parse", "--verify", "HEAD^{commit}").strip()
    if head != pin.commit:
        raise errors.SCORER_SOURCE(
            f"reward.checkout {root} is at commit {head}; check out {pin.commit}"
        )
    # Untracked files too: the trainer can import them.
    options = ("--porcelain=v1", "-z", "-uall", "--no-renames", "--ignore-submodules=dirty")
    if entries := [entry for entry in git.run("status", *options).split("\0") if entry]:
        raise errors.SCORER_SOURCE(
            f"reward.checkout {root} is not clean: {len(entries)} changed or untracked files, "
            f"first {entries[0][3:]!r}; restore them, or list your own in .git/info/exclude"
        )
    path = root / pin.path
    _refuse_links(root, path)
    binding = {"kind": "checkout", "root": str(root), "head": head, "clean": True, "path": pin.path}
    return _verified(path, pin.sha256, root, binding)


def verify_file(source: Path, source_sha256: str) -> VerifiedSource:
    """The same of one file, for installations that do not carry the whole checkout."""
    if not is_sha256(source_sha256):
        raise errors.SCORER_SOURCE(
            "reward.source_sha256 must be 64 lower-case hex digits: the output of sha256sum"
        )
    path = source.parent.resolve() / source.name
    return _verified(path, source_sha256, path, {"kind": "file", "path": str(path)})


def _verified(path: Path, sha256: str, root: Path, binding: dict[str, Any]) -> VerifiedSource:
    try:
        text = _read(path)
    except OSError as error:
        raise errors.SCORER_SOURCE(
            f"the scorer's source {path} cannot be read ({error.strerror}); it must be a regular "
            "file, not a link, readable by this user"
        ) from error
    if (found := hashlib.sha256(text).hexdigest()) != sha256:
        raise errors.SCORER_SOURCE(
            f"the scorer's source {path} has sha256 {found}, pinned is {sha256}; "
            "restore the pinned file"
        )
    return VerifiedSource(path, sha256, text, root, binding | {"sha256": sha256})


def _read(path: Path) -> bytes:
    """The bytes of a regular file. ``O_NONBLOCK``: a pipe put in its place must not hang."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > SOURCE_BYTES_MAX:
            limit = f"a regular file of at most {SOURCE_BYTES_MAX} bytes"
            raise errors.SCORER_SOURCE(f"the scorer's source {path} is not {limit}")
        return file.read(SOURCE_BYTES_MAX + 1)


def _refuse_links(root: Path, path: Path) -> None:
    """A link on the way could be turned to other bytes between verifying and reading."""
    step = root
    for part in path.relative_to(root).parts:
        step = step / part
        if step.is_symlink():
            raise errors.SCORER_SOURCE(
                f"{step} is a symbolic link; the scorer's source must be the checkout's own file"
            )


# No configuration of the system or the user, no prompts, no locks; and no search upwards.
_ENVIRONMENT = {
    "PATH": os.defpath,
    "LC_ALL": "C",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
}


class _Git:
    """Runs git on a checkout so that only the checkout's facts, never its programs, are used."""

    def __init__(self, root: Path) -> None:
        if (found := shutil.which("git")) is None:
            raise errors.SCORER_SOURCE(
                "git is not installed, so reward.checkout cannot be verified; install it, or pin "
                "the one file with reward.source and reward.source_sha256"
            )
        self._program = os.path.abspath(found)
        self._root = root
        self._settings = [
            "core.fsmonitor=false",
            f"core.hooksPath={os.devnull}",
            f"core.attributesFile={os.devnull}",
            "protocol.allow=never",
        ]
        # Content filters are commands the checkout's configuration names; ``status`` runs them.
        done = self._call(("config", "--null", "--name-only", "--get-regexp", r"^filter\."))
        names = done.stdout.decode("utf-8", "surrogateescape").split("\0")
        for driver in sorted({name[len("filter.") :].rpartition(".")[0] for name in names if name}):
            if "=" in driver:  # "-c" ends a name at its first "=": it could not be switched off
                raise errors.SCORER_SOURCE(
                    f"the git configuration of reward.checkout {self._root} names a filter with "
                    "'='; remove it"
                )
            for setting in ("clean=", "smudge=", "process=", "required=false"):
                self._settings.append(f"filter.{driver}.{setting}")

    def run(self, *words: str) -> str:
        """What git prints. Raises ``ScorerSourceError`` when it fails or hangs."""
        done = self._call(words)
        if done.returncode != 0:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()
            raise errors.SCORER_SOURCE(
                f"git {words[0]} failed on reward.checkout {self._root}: "
                f"{said[0] if said else f'exit {done.returncode}'}"
            )
        return done.stdout.decode("utf-8", "surrogateescape")

    def _call(self, words: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
        # A home of our own carries safe.directory: git older than 2.38 does not take it from "-c".
        with tempfile.TemporaryDirectory(prefix="smartsearch-git-") as home:
            quoted = os.fsencode(self._root)
            for raw, written in ((b"\\", b"\\\\"), (b'"', b'\\"'), (b"\n", b"\\n")):
                quoted = quoted.replace(raw, written)
            Path(home, ".gitconfig").write_bytes(b'[safe]\n\tdirectory = "' + quoted + b'"\n')
            settings = [part for setting in self._settings for part in ("-c", setting)]
            above = str(self._root.parent)
            try:
                return subprocess.run(  # noqa: S603 - git itself, with words of ours
                    [self._program, "-C", str(self._root), *settings, *words],
                    env=_ENVIRONMENT | {"HOME": home, "GIT_CEILING_DIRECTORIES": above},
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=GIT_SECONDS,
                    check=False,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise errors.SCORER_SOURCE(
                    f"git could not be run on reward.checkout {self._root} "
                    f"({type(error).__name__}); run git status there by hand"
                ) from error
