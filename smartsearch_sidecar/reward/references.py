"""The declared references: which answers belong to a question, and to which split.

A reward may only be computed against answers that were declared when the run was claimed. The
question is found where the scorer finds it, and everything is compared after NFC, because the
rollout has been through a tokenizer that composes and the dataset has not. No message of this
module holds an answer.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract.json import NotStrictJson, parse_strict
from smartsearch_sidecar.run.json_values import is_filled_text

Split: TypeAlias = Literal["train", "validation"]
Declared: TypeAlias = dict[str, tuple[Split, tuple[str, ...]]]
"""A question (stripped, NFC) to its split and answers (NFC)."""

TURN_START: Final = "<|im_start|>user\n"
TURN_END: Final = "<|im_end|>"
"""The user turn of the pinned chat template; the scorer reads the first one."""
PARQUET_MAGIC: Final = b"PAR1"
PARQUET_BATCH_ROWS: Final = 1024  # the file is streamed, also where one row group holds it all
ROWS_NAMED_MAX: Final = 5  # a file that is wrong throughout needs no longer list
_COLUMNS: Final = ("question", "golden_answers", "ground_truth", "reward_model.ground_truth")


Facts: TypeAlias = tuple[int, ...] | None
"""By which a file is known again: device, inode, size, times of change. ``None``: not there."""
Files: TypeAlias = tuple[tuple[Split, Path, Facts], ...]


class Located(NamedTuple):
    """Where the question of a rollout was declared; ``question`` is as the scorer finds it."""

    split: Split
    question: str


class References:
    """Questions and their answers, per split.

    Attributes:
        digest: sha256 (hex) that names the contents: the UTF-8 lines
            ``[split, question, [answer, ...]]`` (JSON without spaces, not escaped), in the order of
            split and question. The files' own order, layout and repetitions do not matter.
        counts: questions per declared split.
    """

    def __init__(self, declared: Declared, files: Files = ()) -> None:
        """``files`` are those that were read, as they were before that."""
        self._declared = declared
        self._files = files
        rows = sorted((split, question, answers) for question, (split, answers) in declared.items())
        dump = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
        digest = hashlib.sha256()
        for row in rows:
            digest.update(f"{dump(row)}\n".encode())
        self.digest = digest.hexdigest()
        counts = Counter(split for split, _answers in declared.values())
        self.counts = dict(sorted(counts.items()))

    @classmethod
    def load(cls, train: Path | None, validation: Path | None = None) -> References:
        """Reads Parquet or JSONL (told apart by content), one row a question.

        A row has ``question`` (text) and its answers (text, or a list of texts) as
        ``reward_model.ground_truth``, ``ground_truth`` or ``golden_answers``.

        Raises: ``REFERENCES_INVALID``, which names bad rows by number, counted from 1 (lines, in
        JSONL); ``NOT_AVAILABLE`` for a Parquet file where pyarrow is not installed.
        """
        given: list[tuple[Split, Path | None]] = [("train", train), ("validation", validation)]
        named = [(split, path) for split, path in given if path is not None]
        declared: Declared = {}
        files = tuple((split, path, _facts(path)) for split, path in named)
        for split, path in named:
            _declare(declared, split, path)
        if not declared:
            raise errors.REFERENCES_INVALID(
                "no references are declared: set reward.references.train or .validation"
            )
        return cls(declared, files)

    def recheck(self) -> None:
        """Looks whether the files still declare the same; blocking. They are read again only where
        a file's status says that it was touched. Raises ``REFERENCES_CHANGED``.
        """
        now = tuple((split, path, _facts(path)) for split, path, _ in self._files)
        if now == self._files:
            return
        paths: dict[Split, Path] = {split: path for split, path, _ in self._files}
        try:
            again = References.load(paths.get("train"), paths.get("validation"))
        except errors.UsageError as error:
            raise errors.REFERENCES_CHANGED(
                f"the references can no longer be read: {error.message}"
            ) from error
        if again.digest != self.digest:
            raise errors.REFERENCES_CHANGED(
                f"the references {' and '.join(map(str, paths.values()))} changed while the run "
                "was served: they declare other questions or answers than it was claimed with"
            )
        self._files = now

    def lookup(self, solution_str: str, ground_truth: str | Sequence[str]) -> Located:
        """Finds the question of a rollout and checks the answers sent with it.

        ``ground_truth`` has the answers as the dataset has them: one, or several in order. Raises
        ``NO_USER_TURN``, ``REFERENCE_MISMATCH``.
        """
        question = user_question(solution_str)
        if (found := self._declared.get(_composed(question))) is None:
            raise errors.REFERENCE_MISMATCH(
                "the question of a rollout is not among the declared references; train and "
                "validate on the files named in [reward.references]"
            )
        split, answers = found
        given = (ground_truth,) if isinstance(ground_truth, str) else tuple(ground_truth)
        if tuple(map(_composed, given)) != answers:
            raise errors.REFERENCE_MISMATCH(
                f"the answers sent with a question of the {split} split are not its declared ones; "
                f"reward.references.{split} must be the file the trainer reads"
            )
        return Located(split, question)


def user_question(solution_str: str) -> str:
    """The first user turn, without the white space around it, as the scorer finds it."""
    start = solution_str.find(TURN_START)
    begin = start + len(TURN_START)
    end = solution_str.find(TURN_END, begin)
    if start < 0 or end < 0:
        raise errors.NO_USER_TURN(
            "the text of a rollout has no user turn (<|im_start|>user ... <|im_end|>): the chat "
            "template differs from the pinned one, or special tokens were skipped in decoding"
        )
    return solution_str[begin:end].strip()


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _facts(path: Path) -> Facts:
    try:
        status = os.stat(path)
    except OSError:
        return None  # reading it says why
    return (
        *(status.st_dev, status.st_ino, status.st_size),
        *(status.st_mtime_ns, status.st_ctime_ns),
    )


class _BadRow(Exception):
    """Why one row cannot be used; never leaves this module."""


def _declare(declared: Declared, split: Split, path: Path) -> None:
    """Adds one file, or refuses it with its bad rows."""
    bad: list[str] = []
    number = 0
    for number, row in _rows(path):
        try:
            question, answers = _parse(row)
            before = declared.setdefault(question, (split, answers))
            if before[0] != split:
                raise _BadRow(f"its question is in the {before[0]} split too")
            if before[1] != answers:
                raise _BadRow("its question was declared before with other answers")
        except _BadRow as error:
            bad.append(f"row {number}: {error}")
    if bad:
        more = f"; and {len(bad) - ROWS_NAMED_MAX} more" if len(bad) > ROWS_NAMED_MAX else ""
        raise errors.REFERENCES_INVALID(
            f"reward.references.{split} {path}: {'; '.join(bad[:ROWS_NAMED_MAX])}{more}"
        )
    if not number:
        raise errors.REFERENCES_INVALID(f"reward.references.{split} {path} has no rows")


def _parse(row: object) -> tuple[str, tuple[str, ...]]:
    """Question and answers of one row, stripped and composed as they are compared."""
    if isinstance(row, _BadRow):
        raise row
    if not isinstance(row, Mapping):
        raise _BadRow("not a JSON object")
    question = row.get("question")
    if not is_filled_text(question):
        raise _BadRow("question is not a text, or blank")
    key = _composed(question.strip())
    if TURN_END in key:
        raise _BadRow(f"question holds {TURN_END}, so the scorer would read only a part of it")
    model = row.get("reward_model")
    nested = model.get("ground_truth") if isinstance(model, Mapping) else None
    given = [nested, row.get("ground_truth"), row.get("golden_answers")]
    found = {_answers(value) for value in given if value is not None}
    if not found:
        raise _BadRow("no answers (reward_model.ground_truth, ground_truth or golden_answers)")
    if len(found) > 1:
        raise _BadRow("two columns of answers that differ")
    return key, found.pop()


def _answers(value: object) -> tuple[str, ...]:
    """One answer is a list of one: the scorer reads both alike."""
    listed = value if isinstance(value, list | tuple) else [value]
    if not listed or not all(map(is_filled_text, listed)):
        raise _BadRow("answers are not a text or a list of texts, or one of them is blank")
    return tuple(map(_composed, listed))


def _rows(path: Path) -> Iterator[tuple[int, object]]:
    """Rows with their numbers; in place of a line that cannot be read, a ``_BadRow``."""
    try:
        with path.open("rb") as file:
            is_parquet = file.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC
        yield from _parquet(path) if is_parquet else _jsonl(path)
    except OSError as error:
        raise errors.REFERENCES_INVALID(
            f"the references {path} cannot be read ({error.strerror or error}): correct "
            "[reward.references], or the file's permissions"
        ) from error


def _jsonl(path: Path) -> Iterator[tuple[int, object]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield number, parse_strict(line)
            except NotStrictJson as error:
                yield number, _BadRow(f"not a line of JSON: it {error}")


def _parquet(path: Path) -> Iterator[tuple[int, object]]:
    try:
        arrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise errors.NOT_AVAILABLE(
            f"the references {path} are a Parquet file and pyarrow is not installed: install "
            "smartsearch-sidecar[parquet], or name a JSONL file"
        ) from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            # Names that are not in the file select nothing; a row then says what it lacks.
            for batch in file.iter_batches(PARQUET_BATCH_ROWS, columns=list(_COLUMNS)):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (ValueError, arrow.ArrowException) as error:
        raise errors.REFERENCES_INVALID(
            f"the references {path} are a damaged Parquet file ({type(error).__name__} after "
            f"row {number})"
        ) from error
