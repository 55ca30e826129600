"""Finds an id that a corpus uses twice, in memory that does not grow with the corpus.

Every id costs 24 bytes of disk (a 16-byte digest and its line) and about 1 microsecond; memory
holds one small buffer per bucket, and one bucket at a time when all are looked through.

Apart from ``build.py``, which alone uses it: it is tested without a corpus and without an index.
"""

from __future__ import annotations

import struct
import tempfile
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Final, Self

_BUCKETS: Final = 256  # by the digest's first byte: 21 million ids are 82,000 a bucket
_BLOCK_BYTES: Final = 16_368  # 682 entries; 4 MiB of buffers in all
_ENTRY: Final = struct.Struct("<16sQ")


class DistinctIds:
    """Takes the ids of a corpus, then names the first that came twice.

    Digests have 128 bits, so that two ids are never taken for one by chance.
    """

    def __init__(self, folder: Path, *, block_bytes: int = _BLOCK_BYTES) -> None:
        """What does not fit buffers of ``block_bytes`` goes to an unnamed file in ``folder``.

        ``block_bytes`` is a multiple of an entry's 24.
        """
        self._block_bytes = block_bytes
        self._spill = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - see __exit__
        self._buffers = [bytearray() for _ in range(_BUCKETS)]
        self._offsets: list[list[int]] = [[] for _ in range(_BUCKETS)]
        self._end = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._spill.close()

    def add(self, identifier: str, line: int) -> None:
        """Remembers ``identifier``, seen at ``line``. Raises ``OSError`` when the disk is full."""
        digest = blake2b(identifier.encode(), digest_size=16).digest()
        bucket = digest[0]
        buffer = self._buffers[bucket]
        buffer += _ENTRY.pack(digest, line)
        if len(buffer) >= self._block_bytes:
            self._write(buffer)
            self._offsets[bucket].append(self._end)
            self._end += len(buffer)
            buffer.clear()

    def _write(self, block: bytearray) -> None:
        view = memoryview(block)
        while view:
            view = view[self._spill.write(view) :]

    def first_repeat(self) -> tuple[int, int] | None:
        """The line of the first id that was there before, and where it was; or ``None``."""
        first: tuple[int, int] | None = None
        for bucket in range(_BUCKETS):
            seen: dict[bytes, int] = {}
            for digest, line in _ENTRY.iter_unpack(self._entries(bucket)):
                earlier = seen.get(digest)
                if earlier is None:
                    seen[digest] = line
                elif first is None or line < first[0]:
                    first = (line, earlier)
        return first

    def _entries(self, bucket: int) -> bytes:
        blocks = []
        for offset in self._offsets[bucket]:
            self._spill.seek(offset)
            blocks.append(self._spill.read(self._block_bytes))
        return b"".join([*blocks, self._buffers[bucket]])
