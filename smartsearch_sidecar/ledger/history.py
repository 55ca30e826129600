"""A journal read line by line into the history it tells: order, chain, fold and the last line.

The rules of reading, without I/O. ``resume``, ``verify`` and all other code that reads a whole
journal goes through ``History``, so what one of them refuses the others refuse too.

A record follows another when its ``seq`` is the next and its ``prev`` the other's ``sum``. The
first one is ``run.claimed``, and its ``prev`` is the digest of ``claim.json``. What the fold does
not take is no history either.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.ledger.disk import CLAIM
from smartsearch_sidecar.run.line import (
    FORMAT,
    Line,
    begins_with_record,
    claim_digest,
    decode_line,
    line_sum,
    newer_format,
)
from smartsearch_sidecar.run.record import LatchClosed, RunClaimed
from smartsearch_sidecar.run.state import RunState

LINE_BYTES_MAX = 256 * 1024 * 1024
"""Bytes of one line: five documents of 8 Mi characters, escaped and in UTF-8, still fit."""


class Tail(enum.StrEnum):
    """How the last segment ends."""

    CLEAN = enum.auto()
    UNTERMINATED = enum.auto()
    TORN = enum.auto()


@dataclass(frozen=True, slots=True)
class End:
    """What is to be done with the last piece of a journal, in bytes of that piece.

    ``keep`` bytes are a record (or nothing); the rest was never answered from. ``newline`` says
    that the record lacks its own.
    """

    tail: Tail
    keep: int
    newline: bool


class History:
    """Everything a journal says so far. Feed it every line in order."""

    def __init__(self, claim: bytes | None, *, documents: bool = False) -> None:
        """``claim`` is ``claim.json`` as it lies on disk, ``None`` where there is none;
        ``documents`` whether the lines it gives back hold the passages of answers.
        """
        self._documents = documents
        self.claim_sha256 = None if claim is None else claim_digest(claim)
        self._newer = None if claim is None else _newer(claim)
        self.state = RunState()
        self.seq = 0
        self.head = self.claim_sha256 or ""
        self.kinds: Counter[str] = Counter()
        self.first_at: str | None = None
        self.last: Line | None = None
        self.latch: Line | None = None

    def read(self, raw: bytes) -> Line:
        """Takes one line without its newline.

        Raises ``LedgerCorrupt`` with the reason; the place is the caller's to name.
        """
        if self._newer is not None:  # before anything of it is judged by the rules of this version
            raise errors.LEDGER_CORRUPT(self._newer)
        line = decode_line(raw, documents=self._documents)
        seq, _, prev, total, record, _ = line
        if seq != self.seq + 1:
            raise errors.LEDGER_CORRUPT(f"record {seq} comes after record {self.seq}")
        if prev != self.head:
            raise errors.LEDGER_CORRUPT(self._chain_broken())
        if seq == 1:
            self._first(line)
        elif type(record) is RunClaimed:
            raise errors.LEDGER_CORRUPT("the run was claimed twice")
        self.state.fold(record)
        self.seq, self.head, self.last = seq, total, line
        self.kinds[record.kind.value] += 1
        if type(record) is LatchClosed:
            self.latch = line
        return line

    def end(self, piece: bytes, *, terminated: bool) -> End:
        """Takes the last piece of the last segment, which alone may be torn.

        ``piece`` comes without its newline; ``terminated`` says whether it had one. An empty,
        unterminated piece is what follows the newline of a sound line.
        """
        if terminated and line_sum(piece) is not None:
            self.read(piece)
            return End(Tail.CLEAN, len(piece), newline=False)
        if not terminated and not piece:
            return End(Tail.CLEAN, 0, newline=False)
        body = piece if terminated else piece.rstrip(b"\0")
        if not terminated and line_sum(body) is not None:
            self.read(body)
            tail = Tail.UNTERMINATED if len(body) == len(piece) else Tail.TORN
            return End(tail, len(body), newline=True)
        if begins_with_record(body):
            raise errors.LEDGER_CORRUPT("a whole record is followed by bytes that are no newline")
        return End(Tail.TORN, 0, newline=False)

    def _first(self, line: Line) -> None:
        if not isinstance(line.record, RunClaimed):
            raise errors.LEDGER_CORRUPT(f"the first record is {line.record.kind}, not run.claimed")
        if line.record.claim_sha256 != self.claim_sha256:
            raise errors.LEDGER_CORRUPT("the first record names another claim.json")
        self.first_at = line.at

    def _chain_broken(self) -> str:
        if self.seq:
            return "the line does not chain to the one before it"
        if self.claim_sha256 is None:
            return "claim.json is missing, and the first record chains to it"
        return "claim.json is not the one the first record chains to"


def _newer(claim: bytes) -> str | None:
    """Why a claim is not read, if it states a newer format; a claim cut short states none."""
    try:
        value = orjson.loads(claim)
    except orjson.JSONDecodeError:
        return None
    return newer_format(CLAIM, value, FORMAT)
