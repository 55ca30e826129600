"""A byte-level BPE with Qwen's own merges, as the pinned trainer's tokenizer encodes and decodes.

The merges are a file of the wheel ``dashscope`` (the extra ``dev``), of which nothing else is used.
Letters and digits are told apart by Python's own classes, not by Unicode's: tokens may differ from
Qwen's at rare characters, the text never does.
"""

from __future__ import annotations

import base64
import importlib.util
import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache, cached_property, lru_cache
from itertools import pairwise
from pathlib import Path

SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
)
BOS = "<s>"
_SPECIAL = re.compile("(" + "|".join(map(re.escape, (*SPECIALS, BOS))) + ")")
_PIECE = re.compile(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|(?:[^\r\n\w]|_)?[^\W\d_]+|\d| ?(?:[^\s\w]|_)+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def merges() -> dict[bytes, int]:
    """Every token's bytes with its rank."""
    found = importlib.util.find_spec("dashscope")
    assert found is not None
    assert found.submodule_search_locations
    path = Path(found.submodule_search_locations[0]) / "resources" / "qwen.tiktoken"
    lines = path.read_bytes().splitlines()
    return {base64.b64decode(word): int(rank) for word, rank in map(bytes.split, lines)}


@cache
def _words() -> tuple[bytes, ...]:
    return tuple(sorted(merges(), key=merges().__getitem__))


@lru_cache(100_000)
def _merged(piece: bytes) -> tuple[int, ...]:
    """The tokens of one piece: the pair of the lowest rank is merged until none is left."""
    ranks = merges()
    parts = [piece[at : at + 1] for at in range(len(piece))]
    while len(parts) > 1:
        pairs = [ranks.get(one + other, 2**31) for one, other in pairwise(parts)]
        lowest = min(pairs)
        if lowest == 2**31:
            break
        at = pairs.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return tuple(ranks[part] for part in parts)


class Bpe:
    """One tokenizer. ``bos`` is added before each text that is encoded, and so is a space."""

    def __init__(self, *, bos: bool = False, space: bool = False) -> None:
        self._bos, self._space = bos, space

    @cached_property
    def _specials(self) -> dict[str, int]:
        """Read when first asked for: every worker makes tokenizers where it collects tests."""
        first = len(merges())
        return {text: first + number for number, text in enumerate((*SPECIALS, BOS))}

    @cached_property
    def _texts(self) -> dict[int, str]:
        return {number: text for text, number in self._specials.items()}

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, which is composed (NFC), as the trainer encodes it."""
        composed = unicodedata.normalize("NFC", text)
        tokens = self.written(f" {composed}" if self._space else composed)
        return [self._specials[BOS], *tokens] if self._bos else tokens

    def written(self, text: str) -> list[int]:
        """Tokens as a policy writes them: nothing is composed or added."""
        tokens: list[int] = []
        for part in _SPECIAL.split(text):
            if part in self._specials:
                tokens.append(self._specials[part])
                continue
            pieces = _PIECE.findall(part)
            assert "".join(pieces) == part
            for piece in pieces:
                tokens += _merged(piece.encode())
        return tokens

    def decode(self, tokens: Iterable[int], *, skip_specials: bool = False) -> str:
        """The text of tokens; half a character becomes U+FFFD."""
        words = _words()
        return b"".join(
            words[token]
            if token < len(words)
            else b""
            if skip_specials
            else self._texts[token].encode()
            for token in tokens
        ).decode("utf-8", "replace")

    def stopped(self, tokens: Sequence[int], stop: str) -> list[int]:
        """The tokens up to the one with which the text first holds ``stop``."""
        words, end, held = _words(), stop.encode(), b""
        for number, token in enumerate(tokens, 1):
            held = held[-80:] + (words[token] if token < len(words) else b"")
            if end in held:
                return list(tokens[:number])
        return list(tokens)
