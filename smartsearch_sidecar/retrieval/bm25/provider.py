"""The embedded BM25 provider: an index of tantivy, verified, opened, and searched in threads.

tantivy does not check content when it opens a folder: a damaged page changes answers silently. It
also wants to write a lock file, so it cannot open a read-only folder. Both are met by a private
folder of links to the descriptors whose bytes were just hashed; tantivy maps the files through
them, and the links go at once.

A question is words, never query syntax, so any text of the policy can be searched. Cost is
linear in the postings of the words asked for, so stop words go while another word is left, and of
many words the rarest are asked for.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import tantivy
from tantivy import Occur, Query

from smartsearch_sidecar import errors
from smartsearch_sidecar.config import Config
from smartsearch_sidecar.daemon_threads import DaemonThreads
from smartsearch_sidecar.retrieval.bm25 import manifest as manifests
from smartsearch_sidecar.retrieval.bm25.analysis import (
    CONTENTS,
    ID,
    STOP_WORDS,
    TEXT,
    analyzer,
    prepared,
)
from smartsearch_sidecar.retrieval.bm25.manifest import REBUILD, Manifest, cannot_read, remove
from smartsearch_sidecar.retrieval.provider import Progress

WORDS_MAX: Final = 32
"""Distinct words of one question that are searched: 4 KB of text cost 2 ms instead of 222 at two
million passages, at the same recall."""
TOP_N_MAX: Final = 100  # tantivy sets memory aside by this number before it looks at anything
_PANIC: Final = "PanicException"  # not importable; a BaseException that `except Exception` misses
_HASH_BYTES: Final = 1024 * 1024
_MEMORY_FOLDER: Final = "/dev/shm"  # noqa: S108 - only links go there, into a folder of our own


async def open_configured(config: Config, progress: Progress | None = None) -> Bm25Provider:
    """The provider of ``[retrieval.bm25]``. Raises ``IndexUnusable``."""
    folder = Path(str(config.retrieval.bm25.index))
    return Bm25Provider(await asyncio.to_thread(verify_and_open, folder, progress=progress))


def verify_and_open(folder: Path, *, progress: Progress | None = None) -> Bm25Index:
    """Verifies every file of the index in ``folder`` and opens those; blocks: run it in a thread.
    Raises ``IndexUnusable`` that names the file and the remedy.
    """
    manifest = manifests.read(folder)
    try:
        # Where a link points is what is served; the link may be pointed elsewhere for the next run.
        files = ServedFiles(folder.resolve())
    except OSError as error:
        raise cannot_read(folder, error) from None
    with ExitStack() as failed:
        failed.callback(files.close)
        _verify(files, manifest, progress)
        index = _opened(files)
        searcher = index.searcher()
        if searcher.num_docs != manifest.passages or searcher.num_segments != 1:
            raise _unusable(
                f"the index at {folder} holds {searcher.num_docs} passages in "
                f"{searcher.num_segments} parts, its manifest says {manifest.passages} in one"
            )
        failed.pop_all()
    return Bm25Index(manifest, files, index)


class Bm25Index:
    """A verified index in this process. Searches block; they may run in several threads at once."""

    def __init__(self, manifest: Manifest, files: ServedFiles, index: tantivy.Index) -> None:
        self.manifest = manifest
        self.files = files
        self._schema = index.schema
        self._searcher = index.searcher()
        self._analyzer = analyzer()
        self._stop_words = frozenset(self._analyzer.analyze(STOP_WORDS))

    def words(self, question: str) -> dict[str, int]:
        """What is searched for ``question``: its words, in its order, and how often each occurs."""
        tokens: list[str] = self._analyzer.analyze(prepared(question))
        counts = Counter(token for token in tokens if token not in self._stop_words)
        if not counts:
            counts = Counter(tokens)
        if len(counts) <= WORDS_MAX:
            return counts
        # Words that no passage has cost nothing and find nothing: they must not take up the places.
        held = {word: self._searcher.doc_freq(TEXT, word) for word in counts}
        rarest = sorted((frequency, word) for word, frequency in held.items() if frequency)
        kept = {word for _, word in rarest[:WORDS_MAX]}
        return {word: count for word, count in counts.items() if word in kept}

    def search(self, question: str, top_n: int) -> list[dict[str, Any]]:
        """The best ``top_n`` passages, best first, ties in corpus order; none for no words.

        Raises ``ProviderFault`` when the index fails under a search: it was verified, so an error
        is damage that came later, never an answer.
        """
        if not 1 <= top_n <= TOP_N_MAX:
            raise errors.INTERNAL_ERROR(f"top_n is {top_n}; 1 to {TOP_N_MAX} can be asked for")
        try:
            words = self.words(question)
            if not words:
                return []
            clauses = []
            for word, count in words.items():
                # As the schema indexes it: "basic" would leave the frequencies out of the score.
                clause = Query.term_query(self._schema, TEXT, word, index_option="freq")
                if count > 1:
                    clause = Query.boost_query(clause, float(count))
                clauses.append((Occur.Should, clause))
            query = Query.boolean_query(clauses)
            hits = self._searcher.search(query, top_n, count=False).hits
            return [self._document(score, address) for score, address in hits]
        except BaseException as error:
            if not isinstance(error, ValueError) and type(error).__name__ != _PANIC:
                raise
            raise errors.PROVIDER_FAULT(
                f"the index at {self.files.folder} failed in a search ({type(error).__name__}); "
                "verify its files before it is served again"
            ) from error

    def _document(self, score: float, address: Any) -> dict[str, Any]:
        stored = self._searcher.doc(address)
        identifier, contents = stored[ID][0], stored[CONTENTS][0]
        return {"id": identifier.decode(), "contents": contents.decode(), "score": score}


class Bm25Provider:
    """A ``Provider`` over one ``Bm25Index``: its identity is that of the verified files."""

    name = "bm25"
    remote = False

    def __init__(self, index: Bm25Index) -> None:
        self.index = index
        manifest = index.manifest
        self._identity: Mapping[str, Any] = MappingProxyType(
            {
                "provider": self.name,
                "corpus_sha256": manifest.corpus_sha256,
                "index_sha256": manifest.index_sha256,
                "passages": manifest.passages,
                "analyzer": manifest.analyzer,
                "engine": manifest.tantivy,
            }
        )
        cores = len(os.sched_getaffinity(0))
        self._threads = DaemonThreads(max(2, cores), self.name, errors.PROVIDER_FAULT)

    async def identity(self) -> Mapping[str, Any]:
        """Corpus and index, as verified; a look at every file says that they still are."""
        if self.index.files.touched():
            await self._threads.run(self.index.files.look_through)
        return self._identity

    async def search(self, query: str, top_n: int) -> list[dict[str, Any]]:
        """Searches in a thread. One that is cancelled runs to its end, its answer unused."""
        return await self._threads.run(lambda: self.index.search(query, top_n))

    async def close(self) -> None:
        """Lets the searches that are running end, and drops those that wait."""
        self._threads.stop()
        await asyncio.to_thread(self._threads.join)
        self.index.files.close()


Facts = tuple[int, ...]


def _facts(status: os.stat_result) -> Facts:
    """By which a served file is known again: device, inode, size, time of change."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _folder_facts(status: os.stat_result) -> Facts:
    """What moves when a name in the folder, or the folder itself, comes, goes or changes hands."""
    return status.st_nlink, status.st_mtime_ns, status.st_ctime_ns


class ServedFiles:
    """The files of an open index, and whether they still are the ones that were verified. Held by
    descriptor, so that looking costs no walk along a path: it is done for every search.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.handles: dict[str, int] = {}
        self._facts: dict[int, tuple[str, Facts]] = {}
        self._handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._folder_facts = _folder_facts(os.fstat(self._handle))

    def add(self, name: str) -> int:
        """Opens a file and takes its facts before it is verified, so that a later change shows."""
        handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._handle)
        self.handles[name] = handle
        self._facts[handle] = (name, _facts(os.fstat(handle)))
        return handle

    def touched(self) -> bool:
        """Whether the folder must be looked through. Raises ``IdentityChanged`` naming an open file
        that is not as it was verified.
        """
        for handle, (name, before) in self._facts.items():
            if _facts(os.fstat(handle)) != before:
                path = self.folder / name
                raise errors.IDENTITY_CHANGED(f"{path} was changed while it is served")
        return _folder_facts(os.fstat(self._handle)) != self._folder_facts

    def look_through(self) -> None:
        """Whether the folder's names still lead to the files that are served; walks a path each,
        which may block. Raises ``IdentityChanged`` naming the first one that does not.
        """
        now = _folder_facts(os.fstat(self._handle))
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
        self._folder_facts = now

    def close(self) -> None:
        """Lets go of the descriptors; what tantivy has mapped stays mapped."""
        handles = [*self.handles.values(), self._handle]
        self.handles.clear()
        self._facts.clear()
        for handle in handles:
            os.close(handle)


def _verify(files: ServedFiles, manifest: Manifest, progress: Progress | None) -> None:
    """Hashes every file through the descriptor it will be served from."""
    view = memoryview(bytearray(_HASH_BYTES))
    total = sum(file.bytes for file in manifest.files.values())
    done = 0
    for name, expected in manifest.files.items():
        path = files.folder / name
        digest = hashlib.sha256()
        try:
            handle = files.add(name)
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise _unusable(f"{path} is not a regular file")
            if status.st_size != expected.bytes:
                raise _unusable(
                    f"{path} has {status.st_size} bytes, its manifest says {expected.bytes}"
                )
            while count := os.readv(handle, [view]):
                digest.update(view[:count])
                done += count
                if progress is not None:
                    progress(done, total)
        except FileNotFoundError:
            raise _unusable(f"{path} is missing") from None
        except OSError as error:
            raise cannot_read(path, error) from None
        if digest.hexdigest() != expected.sha256:
            raise _unusable(f"{path} differs from its manifest (sha256)")
    _check_digests(files, manifest)


def _check_digests(files: ServedFiles, manifest: Manifest) -> None:
    """The digests that name the index are derived again: they are what a run is claimed with."""
    meta = files.handles.get(manifests.META)
    if meta is None:
        raise _unusable(f"the manifest of {files.folder} names no {manifests.META}")
    raw = os.pread(meta, manifest.files[manifests.META].bytes, 0)
    content = manifests.content_digest(raw, manifest.files)
    index = manifests.index_digest(manifest.passages, content)
    if (content, index) != (manifest.content_sha256, manifest.index_sha256):
        raise _unusable(f"the manifest of {files.folder} is not that of its files")


def _opened(files: ServedFiles) -> tantivy.Index:
    view = Path(_private_folder())
    try:
        for name, handle in files.handles.items():
            (view / name).symlink_to(f"/proc/self/fd/{handle}")
        index = tantivy.Index.open(str(view))
        index.config_reader("manual")  # the folder is about to go: no commit to watch for
        return index
    except ValueError as error:
        first = (str(error).splitlines() or ["no reason given"])[0]
        raise _unusable(f"tantivy cannot open the index at {files.folder}: {first}") from error
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


def _unusable(what: str) -> errors.UsageError:
    return errors.INDEX_UNUSABLE(f"{what}; restore it, or build the index again with {REBUILD}")
