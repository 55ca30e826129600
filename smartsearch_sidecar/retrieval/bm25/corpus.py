"""A corpus file, read as a stream of passages as often as needed: digest, lines, faults.

Memory is that of the longest entry. A fault is a ``CorpusError`` that names file, line and remedy.
The digest is of the file's bytes as it lies on disk, so it is the same on every machine and can be
compared with ``sha256sum``; a compressed file is another file than its contents.

Apart from ``build.py``, which alone reads a corpus: here is what a corpus is, there what is made of
it.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, NamedTuple

from smartsearch_sidecar import errors
from smartsearch_sidecar.retrieval.bm25.formats import (
    ENTRY_BYTES_MAX,
    LINES,
    Entry,
    Format,
    Unreadable,
    is_header,
    recognised,
    vital,
)
from smartsearch_sidecar.retrieval.passages import PASSAGE_TAG, TEXT_CHARACTERS_MAX

if TYPE_CHECKING:
    from _hashlib import HASH

    from _typeshed import WriteableBuffer

ID_CHARACTERS_MAX: Final = 1024
"""An id is recorded with every answer it is part of."""

_GZIP: Final = b"\x1f\x8b"
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_BUFFER_BYTES: Final = 1024 * 1024

Seen = Callable[[int], None]
"""Told now and then how many bytes of the file have been read."""


class CorpusPassage(NamedTuple):
    """One passage: the line it ends at, its id (stripped), its contents (verbatim)."""

    line: int
    id: str
    contents: str


def carries_tag(contents: str) -> bool:
    """Whether a passage would forge or end a block of the rollout; the guard's own rule."""
    # Every tag begins with "<", which most passages lack: looking for that first is much cheaper.
    return "<" in contents and PASSAGE_TAG.search(contents) is not None


class Corpus:
    """One corpus file of a known format."""

    def __init__(self, path: Path, form: Format | None = None) -> None:
        """Finds out the format, unless ``form`` names it. Raises ``CorpusError``."""
        self.path = path
        try:
            facts = path.stat()
        except FileNotFoundError:
            raise errors.CORPUS_INVALID(
                f"there is no corpus at {path}; name an existing file"
            ) from None
        except OSError as error:
            raise _cannot_read(path, error) from None
        if not stat.S_ISREG(facts.st_mode):
            raise errors.CORPUS_INVALID(
                f"{path} is not a regular file, and it is read twice; name a file"
            )
        self.size = facts.st_size
        self.form = self._recognise() if form is None else form

    def _recognise(self) -> Format:
        reading = Reading(self, None)
        with reading.opened() as stream:
            while head := stream.readline(ENTRY_BYTES_MAX):
                reading.line += 1
                bare = head.removeprefix(_BYTE_ORDER_MARK).strip()
                if bare:
                    try:
                        return recognised(bare)
                    except Unreadable as error:
                        raise reading.fault(error) from None
        raise errors.CORPUS_INVALID(f"{self.path} is empty; name a file that holds passages")

    def read(self, seen: Seen | None = None) -> Reading:
        """One pass over the file, from its start."""
        return Reading(self, seen)


class Reading:
    """One pass over a corpus: iterate it once, to its end, then ask for ``sha256``."""

    def __init__(self, corpus: Corpus, seen: Seen | None) -> None:
        self.line = 0
        self._corpus = corpus
        self._seen = seen
        self._digest = hashlib.sha256()
        self._finished = False

    @property
    def sha256(self) -> str:
        """Of the whole file as it lies on disk."""
        if not self._finished:
            raise errors.INTERNAL_ERROR(
                "a corpus's digest was asked for before it was read to its end"
            )
        return self._digest.hexdigest()

    def fault(self, reason: Exception | str) -> errors.UsageError:
        """What is wrong, with the place this pass has come to."""
        return errors.CORPUS_INVALID(f"{self._corpus.path}, line {self.line}: {reason}")

    def __iter__(self) -> Iterator[CorpusPassage]:
        """Yields the passages in order. Raises ``CorpusError``."""
        with self.opened() as stream:
            try:
                for line, (identifier, contents) in self._entries(stream):
                    self.line = line
                    yield CorpusPassage(line, _checked_id(identifier), _checked(contents))
            except Unreadable as error:
                self.line = error.line or self.line
                raise self.fault(error) from None
        self._finished = True

    def _entries(self, stream: IO[bytes]) -> Iterator[tuple[int, Entry]]:
        form = self._corpus.form
        if form is Format.VITAL:
            yield from vital(io.TextIOWrapper(stream, "utf-8-sig", newline=""))
            return
        entry_of = LINES[form]
        number = 0
        while line := stream.readline(ENTRY_BYTES_MAX + 1):
            number += 1
            self.line = number
            if len(line) > ENTRY_BYTES_MAX:
                raise Unreadable(f"over {ENTRY_BYTES_MAX} bytes in one line; split the passage")
            if number == 1:
                line = line.removeprefix(_BYTE_ORDER_MARK)
                if form is Format.DPR and is_header(line):
                    continue
            line = line.rstrip(b"\r\n")
            if line and not line.isspace():
                yield number, entry_of(line)

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """The file's contents as bytes, unpacked where it is gzip. Raises ``CorpusError``."""
        with ExitStack() as stack:
            try:
                raw = stack.enter_context(_Hashing(self._corpus.path, self._digest, self._seen))
                file = stack.enter_context(io.BufferedReader(raw, _BUFFER_BYTES))
                if file.peek(2)[:2] != _GZIP:
                    yield file
                    return
                unpacked = stack.enter_context(gzip.GzipFile(fileobj=file))
                yield stack.enter_context(io.BufferedReader(unpacked, _BUFFER_BYTES))
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                # The entry after the last whole one is where unpacking stopped.
                raise errors.CORPUS_INVALID(
                    f"{self._corpus.path}, after line {self.line}: the gzip file is cut short or "
                    f"damaged ({error}); fetch it again"
                ) from None
            except OSError as error:
                raise _cannot_read(self._corpus.path, error) from None


class _Hashing(io.RawIOBase):
    """The raw file; every byte that is read passes through the digest."""

    def __init__(self, path: Path, digest: HASH, seen: Seen | None) -> None:
        super().__init__()
        self._file = io.FileIO(path)
        self._digest = digest
        self._seen = seen
        self._done = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer)
        count = self._file.readinto(view) or 0
        self._digest.update(view[:count])
        self._done += count
        if self._seen is not None:
            self._seen(self._done)
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _cannot_read(path: Path, error: OSError) -> errors.UsageError:
    return errors.CORPUS_INVALID(f"{path} cannot be read: {error.strerror or error}")


def _checked_id(identifier: str) -> str:
    bare = identifier.strip()
    if not bare:
        raise Unreadable("the id is empty; give every passage an id of its own")
    if len(bare) > ID_CHARACTERS_MAX:
        raise Unreadable(f"the id has {len(bare)} characters, {ID_CHARACTERS_MAX} are allowed")
    return bare


def _checked(contents: str) -> str:
    if not contents or contents.isspace():
        raise Unreadable("the contents are empty; remove the line")
    if len(contents) > TEXT_CHARACTERS_MAX:
        raise Unreadable(f"the contents have over {TEXT_CHARACTERS_MAX} characters; split them")
    return contents
