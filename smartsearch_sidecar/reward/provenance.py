"""Which result blocks of a rollout are answers of this run.

The native client never raises: a refused connection, a proxy's 502 or a timeout becomes text inside
``<result>`` and training goes on. We cannot see such a failure, but the rollout shows it. The
policy cannot write where the rollout does: generation stops at ``</search>``, the last token is
replaced so that nothing follows it, and the rollout puts its block there. (A call is made once a
stop, so only one block follows.) Between the two stands at most what a tokenizer adds of its own:
white space and special tokens, the glue. Hence:

- a ``<result>`` after ``</search>`` and glue is the rollout's, and must be an answer of this run to
  the query that stands before it;
- a block of the rollout without an end was cut by the response length: it must begin as an answer
  to its query does;
- any other ``<result>`` is the policy's own text: counted, never refused.

Judged is the response only, from the generation prompt on: the system prompt shows blocks as
examples.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterator
from typing import Final, NamedTuple
from zlib import crc32

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract.execute import (
    DECLINED_CALL_RESULT,
    DECLINED_RESULT,
    QUERY_BYTES_MAX,
    query_problem,
)

THINK: Final = "<think>"
THINKS_OF_THE_PROMPT: Final = 3  # the fourth ends the generation prompt: no policy can omit it
TURN_START: Final = "<|im_start|>"
TURN_END: Final = "<|im_end|>"
SEARCH_START: Final = "<search>"
SEARCH_END: Final = "</search>"
RESULT_START: Final = "<result>"
RESULT_END: Final = "</result>"

DECLINED_CALL: Final = ""
"""A declined call holds no query that could be read: its answer is held under this one."""

QUERY_BYTES: Final = 8
WHOLE_BYTES: Final = 8
LITERAL_BYTES: Final = 6
CHECKED_AT: Final = (21, 57, 201, 777, 3081, 12297)
"""How far into a block, in bytes, the ``CHECKED_BYTES`` before it have a check of one byte. A cut
block is compared at each of these places that it reaches."""
CHECKED_BYTES: Final = 32
DIGEST_BYTES: Final = QUERY_BYTES + WHOLE_BYTES + LITERAL_BYTES + len(CHECKED_AT)

_HEAD: Final = "result: \n"  # how the client names the field; it omits an empty one
_TAIL: Final = f"\n{RESULT_END}"
# The blocks of what was declined, from behind their <result> on.
_DECLINED: Final = f"{_HEAD}{DECLINED_RESULT}{_TAIL}"
_DECLINED_CALL: Final = f"{_HEAD}{DECLINED_CALL_RESULT}{_TAIL}"
_SHARD_DIGESTS: Final = 128  # a look through so many takes a microsecond or two

_SPECIAL: Final = r"<[^<>\s]{1,64}>"  # <|im_end|> <s> </s> <pad>
_SPECIALS: Final = re.compile(_SPECIAL)
_GLUE: Final = rf"(?:\s|(?!</?(?:search|result|answer|think)>){_SPECIAL}|\[[A-Za-z_]{{1,32}}\])*+"
_GLUED: Final = re.compile(_GLUE)
_BLOCK: Final = re.compile(f"{SEARCH_END}{_GLUE}{RESULT_START}")
_CALLS: Final = re.compile(
    rf"<search>(?P<tagged>(?:(?!</?search>).)*+)</search>(?!{_GLUE}(?:<result>|.{{0,32}}\Z))"
    r'|"query"\s*+:\s*+(?P<json>"(?:[^"\\]|\\.)*+")',
    re.DOTALL,
)


class Judgement(NamedTuple):
    """What the blocks of one response are."""

    judged: int  # blocks where only the rollout writes, one that was cut among them
    policy_own: int  # other ``<result>`` tags
    cut: int  # 1 when the last block of the rollout has no end, else 0
    broken: tuple[int, ...]  # offsets of the judged blocks that are no answer of this run
    unjudged: int = 0  # where none is judged: calls the response shows that this run answered


class AnswerDigests:
    """The answers of this run, each as 28 bytes in which a block finds itself again.

    Its query, the block it becomes, and how that block begins. The digests of a query stand in one
    shard, end to end, and are looked through there: 32 bytes an answer with what a growing
    ``bytearray`` holds in advance, where a set of Python objects takes over 100. One thread adds;
    any thread may judge meanwhile, since a digest is appended in one step and never moves.
    """

    def __init__(self, capacity: int) -> None:
        """``capacity`` bounds the distinct answers: the attempts this run may admit."""
        self._capacity = capacity
        self._shards: list[bytearray | None] = [None] * (1 + capacity // _SHARD_DIGESTS)
        self._count = 0

    def __len__(self) -> int:
        """Distinct answers held."""
        return self._count

    def add(self, query: str, result_text: str) -> None:
        """Remembers an answer, its ``result`` as sent. Call it before it is handed over."""
        self.add_digest(answer_digest(query, result_text))

    def add_digest(self, digest: bytes) -> bool:
        """The same for an ``answer_digest``; whether it was new. Raises ``InvariantBroken`` for
        more distinct answers than the capacity.
        """
        if next(self._held(digest[: QUERY_BYTES + WHOLE_BYTES]), None) is not None:
            return False
        if self._count >= self._capacity:
            raise errors.INTERNAL_ERROR(
                f"more than {self._capacity} distinct answers were handed over; the digests of "
                "answers are sized from execute.max_calls"
            )
        number = self._shard(digest)
        shard = self._shards[number]
        if shard is None:
            self._shards[number] = bytearray(digest)
        else:
            shard += digest
        self._count += 1
        return True

    def has(self, query: str, block: str) -> bool:
        """Whether a block, as it stands in a rollout, is an answer of this run to the query."""
        text = block.removeprefix(RESULT_START)
        if text == _DECLINED and _is_declined(query):
            return True
        if text == _DECLINED_CALL:
            query = DECLINED_CALL
        key = _query_digest(query) + _block_digest(text)[:WHOLE_BYTES]
        return next(self._held(key), None) is not None

    def has_beginning(self, query: str, block: str) -> bool:
        """Whether a block that was cut begins as an answer of this run to the query does."""
        text = _uncut(block.removeprefix(RESULT_START))
        if _DECLINED.startswith(text) and _is_declined(query):
            return True
        if _DECLINED_CALL.startswith(text) and self.has(query, RESULT_START + _DECLINED_CALL):
            return True
        if not _HEAD.startswith(text[: len(_HEAD)]):
            return _TAIL.startswith(text) and self.has(query, RESULT_START + _TAIL)
        begun = _composed(_settled(text))
        checks = _block_digest(begun)[WHOLE_BYTES:]
        literal = min(LITERAL_BYTES, max(0, len(begun) - len(_HEAD)))
        known = LITERAL_BYTES + sum(at <= len(begun) for at in CHECKED_AT)
        for held in self._held(_query_digest(query)):
            kept = held[QUERY_BYTES + WHOLE_BYTES :]
            if (
                kept[:literal] == checks[:literal]
                and kept[LITERAL_BYTES:known] == checks[LITERAL_BYTES:known]
            ):
                return True
        return False

    def judge(self, solution_str: str) -> Judgement:
        """Judges one rollout: prompt and response, decoded together, special tokens kept. Raises
        ``TEMPLATE_DIFFERS`` where no response can be told apart.
        """
        start = before = _response(solution_str)
        judged = policy_own = cut = 0
        broken: list[int] = []
        place = solution_str.find(RESULT_START, start)
        while place >= 0:
            after = place + len(RESULT_START)
            query = _query_of(solution_str, before, place)
            if query is None:
                policy_own += 1
            else:
                judged += 1
                end = solution_str.find(RESULT_END, after)
                if end >= 0:
                    before = after = end + len(RESULT_END)
                    known = self.has(query, solution_str[place:after])
                elif _BLOCK.search(solution_str, after) is None:
                    cut, known = 1, self.has_beginning(query, solution_str[place:])
                    after = len(solution_str)
                else:
                    before, known = after, False
                if not known:
                    broken.append(place)
            place = solution_str.find(RESULT_START, after)
        unjudged = 0 if judged else self._unjudged(solution_str, start)
        return Judgement(judged, policy_own, cut, tuple(broken), unjudged)

    def _unjudged(self, solution_str: str, start: int) -> int:
        """Calls that a response without any block of the rollout shows, and this run answered. One
        at its very end is none of them: the limit cut what followed, or the last token went on.
        """
        found = 0
        for call in _CALLS.finditer(solution_str, start):
            query = call["tagged"]
            if query is None:
                try:
                    query = json.loads(call["json"])
                except ValueError:
                    continue  # the policy's own JSON
            found += next(self._held(_query_digest(query)), None) is not None
        return found

    def _shard(self, key: bytes) -> int:
        return int.from_bytes(key[:QUERY_BYTES], "big") % len(self._shards)

    def _held(self, key: bytes) -> Iterator[bytes]:
        """The digests that begin with ``key``, which holds at least that of the query."""
        shard = self._shards[self._shard(key)]
        place = -1 if shard is None else shard.find(key)
        while shard is not None and place >= 0:
            if place % DIGEST_BYTES == 0:
                yield bytes(shard[place : place + DIGEST_BYTES])
            place = shard.find(key, place + 1)


def answer_digest(query: str, result_text: str) -> bytes:
    """What is kept of an answer: ``DIGEST_BYTES`` of its query and of the block it becomes."""
    return _query_digest(query) + _block_digest(block_of(result_text).removeprefix(RESULT_START))


def block_of(result_text: str) -> str:
    """The block an answer becomes. The client names the field and strips; an empty one it omits."""
    client_text = f"{_HEAD}{result_text}".strip() if result_text else ""
    return f"{RESULT_START}{client_text}{_TAIL}"


def _query_digest(query: str) -> bytes:
    """Of what a query says. The pinned trainer refines a query in a rollout that it decodes without
    special tokens and encodes again, so these, white space and composition are left out.
    """
    bare = query
    while "<" in bare and (rest := _SPECIALS.sub("", bare)) != bare:
        bare = rest
    text = _composed("".join(bare.split()))
    return hashlib.blake2b(text, digest_size=QUERY_BYTES).digest()


def _block_digest(text: str | bytes) -> bytes:
    """Of a block from behind its ``<result>`` on: of the whole, then how it begins."""
    data = _composed(text) if isinstance(text, str) else text
    literal = data[len(_HEAD) : len(_HEAD) + LITERAL_BYTES].ljust(LITERAL_BYTES, b"\0")
    checks = bytes([crc32(data[max(0, at - CHECKED_BYTES) : at]) & 0xFF for at in CHECKED_AT])
    return hashlib.blake2b(data, digest_size=WHOLE_BYTES).digest() + literal + checks


def _composed(text: str) -> bytes:
    """The UTF-8 form of a text, composed (NFC) as the rollout's tokenizer composes it."""
    return unicodedata.normalize("NFC", text).encode("utf-8", "surrogatepass")


def _uncut(text: str) -> str:
    """A cut text without what may stand at a cut: half a character, white space, special tokens."""
    before = ""
    while text != before:
        before, text = text, text.rstrip().rstrip("\ufffd")
        last = text.rfind("<", max(0, len(text) - 66))
        if last >= 0 and _SPECIALS.fullmatch(text, last):
            text = text[:last]
    return text


def _settled(text: str) -> str:
    """A cut text without its last character: what was cut off may be composed with it."""
    end = len(text)
    while end and _joins(text[end - 1]):
        end -= 1
    return text[: max(0, end - 1)]


def _joins(character: str) -> bool:
    """Whether it may be composed with what stands before it: marks, and the later jamo."""
    return unicodedata.category(character)[0] == "M" or "\u1160" <= character <= "\u11ff"


def _is_declined(query: str) -> bool:
    """Whether ``invalid query`` is this run's answer to a query, or the unmodified environment's.

    It depends on the query alone, so no declined query is remembered. A tokenizer composes to a
    third of the bytes at least: a query a quarter as long as may be can have been too long.
    """
    size = len(query.encode("utf-8", "surrogatepass"))
    return size > QUERY_BYTES_MAX // 4 or query_problem(query) is not None


def _response(solution_str: str) -> int:
    """Where the response begins: at the generation prompt, the first turn after the user's.

    The scorer reads from the fourth ``<think>`` on. Where the prompt shows fewer than three, that
    is a later one of the policy's, and the rounds before it would neither be scored nor judged.
    """
    third = fourth = -len(THINK)
    for _ in range(THINKS_OF_THE_PROMPT + 1):
        third, fourth = fourth, solution_str.find(THINK, fourth + len(THINK))
        if fourth < 0:
            raise errors.TEMPLATE_DIFFERS(
                "the text of a rollout has no fourth <think>, where the response begins: the chat "
                "template differs from the pinned one"
            )
    asked = solution_str.find(f"{TURN_START}user\n")
    asked_end = solution_str.find(TURN_END, asked)
    begins = solution_str.find(TURN_START, asked_end)
    if min(asked, asked_end, begins) < 0 or third > begins:
        raise errors.TEMPLATE_DIFFERS(
            "the prompt of a rollout shows fewer than three <think> before its generation prompt, "
            "so the scorer would not read its first round: the chat template differs from the "
            "pinned one, or the prompt was truncated at its left"
        )
    return begins


def _query_of(solution_str: str, before: int, place: int) -> str | None:
    """The query of a block at ``place``, or ``None`` where the rollout has not written there.

    ``before`` is the end of the block before it: a call is read from what the policy wrote since.
    """
    end = solution_str.rfind(SEARCH_END, before, place)
    if end < 0 or _GLUED.fullmatch(solution_str, end + len(SEARCH_END), place) is None:
        return None
    wrote = solution_str[before:end]
    begin = wrote.rfind(SEARCH_START)
    if begin < 0:  # a tokenizer composes the tag's own ">" with a query that begins with U+0338
        wrote = unicodedata.normalize("NFD", wrote)
        begin = wrote.rfind(SEARCH_START)
    return wrote[begin + len(SEARCH_START) :] if begin >= 0 else wrote
