"""Opens an index after every byte of it has been verified, and opens exactly what was verified.

tantivy does not check content when it opens a folder: a damaged page changes answers silently. It
also wants to write a lock file, so it cannot open a read-only folder. Both are met by a private
folder of links to the descriptors whose bytes were just hashed; tantivy maps the files through
them, and the links go at once.

Apart from ``provider.py``, which alone uses it: here an index is trusted, there it is searched.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import tantivy

from smartsearch_sidecar import errors
from smartsearch_sidecar.retrieval.bm25 import manifest as manifests
from smartsearch_sidecar.retrieval.bm25.manifest import FileFacts, Manifest
from smartsearch_sidecar.retrieval.bm25.staging import remove

Progress = Callable[[int, int], None]
"""Told bytes verified, and bytes in all."""

_HASH_BYTES: Final = 1024 * 1024
_MEMORY_FOLDER: Final = "/dev/shm"  # noqa: S108 - only links go there, into a folder of our own

Facts = tuple[int, ...]


def _facts(status: os.stat_result) -> Facts:
    """By which a served file is known again: device, inode, size, time of change."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _folder_facts(status: os.stat_result) -> Facts:
    """What moves when a name in the folder, or the folder itself, comes, goes or changes hands."""
    return status.st_nlink, status.st_mtime_ns, status.st_ctime_ns


class ServedFiles:
    """The files of an open index, and whether they still are the ones that were verified.

    Held by descriptor, so that looking costs no walk along a path: it is done for every search.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ``OSError`` where the folder cannot be opened."""
        self.folder = folder
        self.handles: dict[str, int] = {}
        self._facts: dict[int, tuple[str, Facts]] = {}
        self._handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._folder_facts = _folder_facts(os.fstat(self._handle))

    def add(self, name: str) -> int:
        """Opens a file and takes its facts, before it is verified: what changes it meanwhile shows.

        Returns the descriptor. Raises ``OSError``.
        """
        handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._handle)
        self.handles[name] = handle
        self._facts[handle] = (name, _facts(os.fstat(handle)))
        return handle

    def check(self) -> None:
        """Raises ``IdentityChanged`` naming the file that is not the one that was verified."""
        for handle, (name, before) in self._facts.items():
            if _facts(os.fstat(handle)) != before:
                raise errors.IDENTITY_CHANGED(
                    f"{self.folder / name} was changed while it is served"
                )
        now = _folder_facts(os.fstat(self._handle))
        if now != self._folder_facts:
            self._check_names()
            self._folder_facts = now

    def _check_names(self) -> None:
        """The folder was touched: whether its names still lead to the files that are served."""
        for name, before in self._facts.values():
            path = self.folder / name
            try:
                there = _facts(os.stat(path))
            except OSError as error:
                raise errors.IDENTITY_CHANGED(
                    f"{path} went away while it is served ({error.strerror or error})"
                ) from None
            if there != before:
                raise errors.IDENTITY_CHANGED(f"{path} was replaced while it is served")

    def close(self) -> None:
        """Lets go of the descriptors; what tantivy has mapped stays mapped."""
        handles = [*self.handles.values(), self._handle]
        self.handles.clear()
        self._facts.clear()
        for handle in handles:
            os.close(handle)


@dataclass(frozen=True, slots=True)
class Opened:
    """A verified index: its manifest, its files, one searcher for the life of the process."""

    manifest: Manifest
    files: ServedFiles
    schema: tantivy.Schema
    searcher: tantivy.Searcher


def open_verified(folder: Path, progress: Progress | None = None) -> Opened:
    """Verifies and opens the index in ``folder``; blocks for as long as hashing it takes.

    Raises ``IndexUnusable`` that names the file and the remedy.
    """
    manifest = manifests.read(folder)
    remedy = (
        "restore it, or build the index again with `smartsearch-sidecar index build CORPUS "
        "NEW_FOLDER` and name that in retrieval.bm25.index"
    )
    try:
        # Where a link points is what is served; the link may be pointed elsewhere for the next run.
        files = ServedFiles(folder.resolve())
    except OSError as error:
        raise errors.INDEX_UNUSABLE(f"{folder} cannot be read: {error.strerror or error}") from None
    with ExitStack() as failed:
        failed.callback(files.close)
        _verify(files, manifest, remedy, progress)
        schema, searcher = _searcher(files, remedy)
        if searcher.num_docs != manifest.passages or searcher.num_segments != 1:
            raise errors.INDEX_UNUSABLE(
                f"the index at {folder} holds {searcher.num_docs} passages in "
                f"{searcher.num_segments} parts, its manifest says {manifest.passages} in one; "
                f"{remedy}"
            )
        failed.pop_all()
    return Opened(manifest, files, schema, searcher)


def _verify(files: ServedFiles, manifest: Manifest, remedy: str, progress: Progress | None) -> None:
    verifier = _Verifier(manifest.files, remedy, progress)
    for name in manifest.files:
        path = files.folder / name
        try:
            handle = files.add(name)
        except FileNotFoundError:
            raise errors.INDEX_UNUSABLE(f"{path} is missing; {remedy}") from None
        except OSError as error:
            raise errors.INDEX_UNUSABLE(
                f"{path} cannot be read: {error.strerror or error}"
            ) from None
        verifier.check(path, handle)
    _check_digests(files, manifest, remedy)


class _Verifier:
    """Hashes files through the descriptors they will be served from."""

    def __init__(
        self, expected: Mapping[str, FileFacts], remedy: str, progress: Progress | None
    ) -> None:
        self._expected = expected
        self._remedy = remedy
        self._progress = progress
        self._total = sum(file.bytes for file in expected.values())
        self._done = 0
        self._buffer = bytearray(_HASH_BYTES)

    def check(self, path: Path, handle: int) -> None:
        """Raises ``IndexUnusable`` where the file is not what the manifest says."""
        expected = self._expected[path.name]
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise errors.INDEX_UNUSABLE(f"{path} is not a regular file; {self._remedy}")
        if status.st_size != expected.bytes:
            raise errors.INDEX_UNUSABLE(
                f"{path} has {status.st_size} bytes, its manifest says {expected.bytes}; "
                f"{self._remedy}"
            )
        if self._digest(path, handle) != expected.sha256:
            raise errors.INDEX_UNUSABLE(
                f"{path} differs from its manifest (sha256); {self._remedy}"
            )

    def _digest(self, path: Path, handle: int) -> str:
        digest = hashlib.sha256()
        view = memoryview(self._buffer)
        try:
            while count := os.readv(handle, [view]):
                digest.update(view[:count])
                self._done += count
                if self._progress is not None:
                    self._progress(self._done, self._total)
        except OSError as error:
            raise errors.INDEX_UNUSABLE(
                f"{path} cannot be read: {error.strerror or error}"
            ) from None
        return digest.hexdigest()


def _check_digests(files: ServedFiles, manifest: Manifest, remedy: str) -> None:
    """The digests that name the index are derived again: they are what a run is claimed with."""
    meta = files.handles.get(manifests.META)
    if meta is None:
        raise errors.INDEX_UNUSABLE(
            f"the manifest of {files.folder} names no {manifests.META}; {remedy}"
        )
    raw = os.pread(meta, manifest.files[manifests.META].bytes, 0)
    content = manifests.content_digest(raw, manifest.files)
    index = manifests.index_digest(manifest.passages, content)
    if (content, index) != (manifest.content_sha256, manifest.index_sha256):
        raise errors.INDEX_UNUSABLE(
            f"the manifest of {files.folder} is not that of its files; {remedy}"
        )


def _searcher(files: ServedFiles, remedy: str) -> tuple[tantivy.Schema, tantivy.Searcher]:
    view = Path(_private_folder())
    try:
        for name, handle in files.handles.items():
            (view / name).symlink_to(f"/proc/self/fd/{handle}")
        index = tantivy.Index.open(str(view))
        index.config_reader("manual")  # the folder is about to go: no commit to watch for
        return index.schema, index.searcher()
    except ValueError as error:
        first = (str(error).splitlines() or ["no reason given"])[0]
        raise errors.INDEX_UNUSABLE(
            f"tantivy cannot open the index at {files.folder}: {first}; {remedy}"
        ) from error
    finally:
        remove(view)  # a watcher of tantivy's may be locking there at this very moment


def _private_folder() -> str:
    """A new folder for links: in the usual place, or in memory where the root is read-only."""
    with suppress(OSError):
        return tempfile.mkdtemp(prefix="smartsearch-index-")
    try:
        return tempfile.mkdtemp(prefix="smartsearch-index-", dir=_MEMORY_FOLDER)
    except OSError as error:
        raise errors.INDEX_UNUSABLE(
            f"no temporary folder can be written ({error.strerror or error}), and opening an index "
            "needs one for links; set TMPDIR to a writable folder"
        ) from None
