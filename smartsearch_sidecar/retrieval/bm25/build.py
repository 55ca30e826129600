"""From a corpus to an index folder: streamed, reproducible, whole or not there at all.

Two passes. The first finds what is wrong (bad entries, repeated ids) before a minute is spent
on indexing, and counts. The second indexes, with one writer thread and a number of commits known
from the count: each a little smaller than the one before, because tantivy merges eight segments of
a like size, largest first. So everything ends in one segment in the corpus's order, and two builds
of one corpus agree byte for byte; any other plan (equal commits, two threads, a full heap) ranks
ties by chance.

All of it happens in a hidden folder beside the index, which is renamed when it is complete.

Apart from ``commands/index.py``, its one user: what an index is, is no matter of a command line.
"""

from __future__ import annotations

import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Final, NamedTuple

import orjson
import tantivy

from smartsearch_sidecar import __version__, errors
from smartsearch_sidecar.retrieval.bm25 import manifest as manifests
from smartsearch_sidecar.retrieval.bm25.analysis import (
    ANALYZER,
    CONTENTS,
    ID,
    TEXT,
    TOKENIZER,
    analyzer,
    prepared,
    schema,
)
from smartsearch_sidecar.retrieval.bm25.corpus import Corpus, Format
from smartsearch_sidecar.retrieval.bm25.manifest import Manifest, publish, seal, workshop
from smartsearch_sidecar.retrieval.passages import carries_tag

BuildProgress = Callable[[str, int, int], None]  # stage, how much is done, and in all (or 0)

FANOUT: Final = 8  # how many segments of a like size tantivy's policy merges
_LEVEL_PASSAGES_MIN: Final = 5_000  # a merged segment must be told from its parts by size
_LIKENESS: Final = 8  # passages a commit for every commit: its first and last are within 1 to 1.5
_PASSAGES_MAX: Final = 75_000_000  # the policy leaves segments over 10 million alone
_TELL_EVERY: Final = 4_096
_WAIT_SECONDS: Final = 0.2
_BUCKETS: Final = 256  # by the digest's first byte: 21 million ids are 82,000 a bucket
_BLOCK_BYTES: Final = 16_368  # 682 entries; 4 MiB of buffers in all
_ENTRY: Final = struct.Struct("<16sQ")


class Sizing(NamedTuple):
    """What bounds the memory of a build. Part of the build's result: keep it when comparing.

    ``heap_bytes`` (up to 4.29e9) is where tantivy would flush by itself and spoil the order; it is
    taken up only as it is used. ``slice_characters`` is the text of one commit, which stays in
    memory until then: 0.9 bytes a character of English, several where each character is a word; far
    enough under the heap for a corpus whose parts differ much in length. Up to
    ``single_commit_passages`` there is nothing to merge.
    """

    heap_bytes: int = 4_000_000_000
    slice_characters: int = 400_000_000
    single_commit_passages: int = 50_000


class Survey(NamedTuple):
    """What the first pass counted: passages kept and left out, characters of those kept."""

    passages: int
    dropped: int
    characters: int
    sha256: str


def build(
    corpus_path: Path,
    out: Path,
    *,
    form: Format | None = None,
    progress: BuildProgress | None = None,
    sizing: Sizing | None = None,
) -> Manifest:
    """Builds the index of a corpus in the new folder ``out``. Passages that carry protocol tags are
    left out and counted. Raises ``CorpusError`` where the corpus is to blame, ``UsageError`` where
    the place is; then, and when it is interrupted, nothing is left behind.
    """
    started = time.monotonic()
    tell = progress or (lambda _stage, _done, _total: None)
    sizing = sizing or Sizing()
    if os.path.lexists(out):
        raise errors.USAGE(f"{out} exists; an index is built into a new folder, so name another")
    corpus = Corpus(corpus_path, form)
    with workshop(out) as folder:
        survey = _survey(corpus, folder, tell)
        _index(corpus, survey, folder, sizing, tell)
        files = seal(folder, lambda done, total: tell("hashing", done, total))
        content = manifests.content_digest((folder / manifests.META).read_bytes(), files)
        manifest = Manifest(
            format=manifests.FORMAT,
            tantivy=manifests.tantivy_version(),
            analyzer=ANALYZER,
            passages=survey.passages,
            dropped=survey.dropped,
            corpus_format=corpus.form.value,
            corpus_sha256=survey.sha256,
            content_sha256=content,
            index_sha256=manifests.index_digest(survey.passages, content),
            files=files,
            built={
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
                "seconds": round(time.monotonic() - started, 3),
                "sidecar": __version__,
            },
        )
        publish(folder, manifest, out)
    return manifest


def plan(passages: int, characters: int, sizing: Sizing) -> list[int]:
    """How many passages each commit takes: 1, 8, 64, … commits, strictly shrinking.

    More than eight merge in levels, so that memory does not grow with the corpus; levels are told
    apart by size, hence a least size.
    """
    if passages <= max(sizing.single_commit_passages, FANOUT * FANOUT):
        return [passages]
    count = FANOUT
    while characters > count * sizing.slice_characters:
        finer = count * FANOUT
        if passages < finer * max(_LEVEL_PASSAGES_MIN, _LIKENESS * finer):
            break  # long passages, or very many: then rather more text in a commit
        count = finer
    sizes = [passages // count + count - 1 - 2 * position for position in range(count)]
    sizes[0] += passages - sum(sizes)
    return sizes


def _survey(corpus: Corpus, folder: Path, tell: BuildProgress) -> Survey:
    """The first pass. Raises ``CorpusError`` for a fault of the corpus."""
    passages = dropped = characters = 0
    reading = corpus.read(lambda done: tell("reading", done, corpus.size))
    with closing(DistinctIds(folder)) as ids:
        for passage in reading:
            ids.add(passage.id, passage.line)
            if carries_tag(passage.contents):
                dropped += 1
            else:
                passages += 1
                characters += len(passage.contents)
        repeat = ids.first_repeat()
    if repeat is not None:
        raise _repeated(corpus, *repeat)
    if not passages:
        why = f"all its {dropped} passages carry protocol tags" if dropped else "it has no passage"
        raise errors.CORPUS_INVALID(f"{corpus.path} cannot be indexed: {why}; name another corpus")
    if passages > _PASSAGES_MAX:
        raise errors.CORPUS_INVALID(
            f"{corpus.path} has {passages} passages, one index holds {_PASSAGES_MAX}; split it"
        )
    return Survey(passages, dropped, characters, reading.sha256)


def _repeated(corpus: Corpus, line: int, earlier: int) -> errors.UsageError:
    seen: set[str] = set()
    for passage in corpus.read():
        if passage.line in (line, earlier):
            if passage.id in seen:
                return errors.CORPUS_INVALID(
                    f"{corpus.path}, line {line}: the id {passage.id[:80]!r} was used in line "
                    f"{earlier} already; give every passage an id of its own"
                )
            seen.add(passage.id)
    raise errors.CORPUS_INVALID(
        f"{corpus.path} changed while it was read; build again when it rests"
    )


def _index(
    corpus: Corpus, survey: Survey, folder: Path, sizing: Sizing, tell: BuildProgress
) -> None:
    """The second pass: every kept passage, in order, into one segment."""
    layout = schema()
    done = 0

    def patience() -> None:
        tell("indexing", done, survey.passages)

    with _writing_errors(folder):
        index = tantivy.Index(layout, path=str(folder))
        index.register_tokenizer(TOKENIZER, analyzer())
        writer = index.writer(heap_size=sizing.heap_bytes, num_threads=1)
        left = plan(survey.passages, survey.characters, sizing)[::-1]
        until_commit = left.pop()
        reading = corpus.read()
        for passage in reading:
            if carries_tag(passage.contents):
                continue
            fields = {
                ID: passage.id.encode(),
                CONTENTS: passage.contents.encode(),
                TEXT: prepared(passage.contents),
            }
            writer.add_document(tantivy.Document.from_dict(fields, layout))
            done += 1
            if done % _TELL_EVERY == 0:
                patience()
            until_commit -= 1
            if not until_commit and left:
                _apart(writer.commit, patience)
                until_commit = left.pop()
        if reading.sha256 != survey.sha256:
            raise errors.CORPUS_INVALID(
                f"{corpus.path} changed while it was read; build again when it rests"
            )
        _apart(writer.commit, patience)
        _apart(writer.wait_merging_threads, lambda: tell("merging", 0, 0))
    segments = orjson.loads((folder / manifests.META).read_bytes())["segments"]
    held = sum(segment["max_doc"] for segment in segments)
    if len(segments) != 1 or held != survey.passages:
        raise errors.USAGE(
            f"the index came out in {len(segments)} parts with {held} of {survey.passages} "
            f"passages, not as one; make room in {folder.parent} (about twice the corpus) and "
            "build again, and if that is no help, shuffle the corpus: its parts differ too much "
            "in length"
        )


def _apart(call: Callable[[], object], waiting: Callable[[], None]) -> None:
    """Runs a long native call in a thread of its own: a signal is then heard while it runs."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised below; a panic is no Exception
            failures.append(error)

    thread = threading.Thread(target=run, name="tantivy", daemon=True)
    thread.start()
    waiting()  # a stage that ends at once is told all the same
    while thread.is_alive():
        thread.join(_WAIT_SECONDS)
        waiting()
    if failures:
        raise failures[0]


@contextmanager
def _writing_errors(folder: Path) -> Iterator[None]:
    """What tantivy raises when it cannot write, ValueError or a panic of its own, as a sentence."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
            raise
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise errors.USAGE(
            f"the index cannot be written in {folder.parent}: {first[:300]}; make room (about "
            "twice the corpus) and build again"
        ) from error


class DistinctIds:
    """Takes the ids of a corpus, then names the first that came twice; memory does not grow.

    An id costs 24 bytes of disk (a digest, long enough that two ids are never taken for one by
    chance, and its line) and about 1 microsecond. Memory holds one small buffer per bucket, and one
    bucket at a time when all are looked through.
    """

    def __init__(self, folder: Path, *, block_bytes: int = _BLOCK_BYTES) -> None:
        """What does not fit buffers of ``block_bytes``, a multiple of an entry's 24, goes to an
        unnamed file in ``folder``.
        """
        self._block_bytes = block_bytes
        self._spill = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - see close
        self._buffers = [bytearray() for _ in range(_BUCKETS)]
        self._offsets: list[list[int]] = [[] for _ in range(_BUCKETS)]
        self._end = 0

    def close(self) -> None:
        self._spill.close()

    def add(self, identifier: str, line: int) -> None:
        """Remembers ``identifier``, seen at ``line``. Raises ``OSError`` when the disk is full."""
        digest = blake2b(identifier.encode(), digest_size=16).digest()
        bucket = digest[0]
        buffer = self._buffers[bucket]
        buffer += _ENTRY.pack(digest, line)
        if len(buffer) >= self._block_bytes:
            view = memoryview(buffer)
            while view:
                view = view[self._spill.write(view) :]
            view.release()  # a buffer that is viewed cannot be cleared
            self._offsets[bucket].append(self._end)
            self._end += len(buffer)
            buffer.clear()

    def first_repeat(self) -> tuple[int, int] | None:
        """The line of the first id that was there before, and where it was; or ``None``."""
        first: tuple[int, int] | None = None
        for bucket in range(_BUCKETS):
            seen: dict[bytes, int] = {}
            blocks = []
            for offset in self._offsets[bucket]:
                self._spill.seek(offset)
                blocks.append(self._spill.read(self._block_bytes))
            entries = b"".join([*blocks, self._buffers[bucket]])
            for digest, line in _ENTRY.iter_unpack(entries):
                earlier = seen.get(digest)
                if earlier is None:
                    seen[digest] = line
                elif first is None or line < first[0]:
                    first = (line, earlier)
        return first
