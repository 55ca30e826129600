"""Which result blocks of a rollout are answers of this run.

The native client never raises: a refused connection, a proxy's 502 or a timeout becomes text inside
``<result>`` and training goes on. We cannot see such a failure, but the rollout shows it. The
policy cannot write where the rollout does: generation stops at ``</search>``, the last token is
replaced so that nothing follows it, and the rollout glues its block to it. (A call is made once a
stop, so only one block follows.) Hence:

- a ``<result>`` directly after ``</search>`` is the rollout's, and must be an answer of this run;
- any other ``<result>`` is the policy's own text: counted, never refused;
- a block of the rollout without an end was cut by the response length: it cannot be judged.

Judged is the response only, from the fourth ``<think>`` on, as the scorer takes it: the system
prompt shows blocks as examples.
"""

from __future__ import annotations

import hashlib
import unicodedata
from typing import Final, NamedTuple

from smartsearch_sidecar import errors

THINK: Final = "<think>"
THINKS_OF_THE_PROMPT: Final = 3  # the fourth ends the generation prompt: no policy can omit it
SEARCH_END: Final = "</search>"
RESULT_START: Final = "<result>"
RESULT_END: Final = "</result>"
DIGEST_BYTES: Final = 16  # two of 10 million texts collide with a probability of 1e-25
UNCOUNTED_ANSWERS: Final = 16  # constant ones that consume no attempt (a declined query)

_FREE: Final = bytes(DIGEST_BYTES)
_SHARD_DIGESTS: Final = 2048  # a full table is rebuilt on the loop: so many take well under 10 ms


class Judgement(NamedTuple):
    """What the blocks of one response are."""

    judged: int  # complete blocks where only the rollout writes
    policy_own: int  # other ``<result>`` tags
    cut: int  # 1 when the last block of the rollout has no end, else 0
    broken: tuple[int, ...]  # offsets of the judged blocks that are no answer of this run


class AnswerDigests:
    """The blocks this run's answers become, as a set of 16-byte digests.

    Open addressing in plain bytes: 21 to 32 bytes a distinct answer, where a set of Python objects
    takes over 100. Tables grow by a half, each for itself, so no addition rebuilds more than a
    shard. One thread adds; any thread may judge meanwhile, since a grown table replaces the old one
    in a single assignment.
    """

    def __init__(self, capacity: int) -> None:
        """``capacity`` bounds the distinct answers: the attempts this run may admit."""
        self._capacity = capacity + UNCOUNTED_ANSWERS
        shards = 1 + capacity // _SHARD_DIGESTS
        self._tables = [bytearray(DIGEST_BYTES * 4) for _ in range(shards)]
        self._held = [0] * shards
        self._count = 0

    def __len__(self) -> int:
        """Distinct answers held."""
        return self._count

    def add(self, result_text: str) -> None:
        """Remembers an answer, its ``result`` as sent. Call it before it is handed over."""
        self.add_digest(block_digest(block_of(result_text)))

    def add_digest(self, digest: bytes) -> None:
        """The same for an answer that another node handed over. Raises ``InvariantBroken`` for more
        distinct answers than the capacity.
        """
        shard = self._shard(digest)
        table = self._tables[shard]
        place = _place(table, digest)
        if table[place : place + DIGEST_BYTES] == digest:
            return
        if self._count >= self._capacity:
            raise errors.INTERNAL_ERROR(
                f"more than {self._capacity} distinct answers were handed over; the digests of "
                "answers are sized from execute.max_calls"
            )
        table[place : place + DIGEST_BYTES] = digest
        self._count += 1
        self._held[shard] += 1
        slots = len(table) // DIGEST_BYTES
        if self._held[shard] * 4 > slots * 3:
            self._tables[shard] = _grown(table, slots + slots // 2)

    def __contains__(self, block: str) -> bool:
        """Whether a block, as it stands in a rollout, is one of an answer of this run."""
        digest = block_digest(block)
        table = self._tables[self._shard(digest)]
        place = _place(table, digest)
        return table[place : place + DIGEST_BYTES] == digest

    def judge(self, solution_str: str) -> Judgement:
        """Judges one rollout: prompt and response, decoded together, special tokens kept. Raises
        ``TEMPLATE_DIFFERS`` where no response can be told apart.
        """
        start = _response(solution_str)
        judged = policy_own = cut = 0
        broken: list[int] = []
        place = solution_str.find(RESULT_START, start)
        while place >= 0:
            after = place + len(RESULT_START)
            if not solution_str.endswith(SEARCH_END, start, place):
                policy_own += 1
            else:
                end = solution_str.find(RESULT_END, after)
                if end < 0 and solution_str.find(SEARCH_END + RESULT_START, after) < 0:
                    cut = 1
                    break
                judged += 1
                if end >= 0:
                    after = end + len(RESULT_END)
                if end < 0 or solution_str[place:after] not in self:
                    broken.append(place)
            place = solution_str.find(RESULT_START, after)
        return Judgement(judged, policy_own, cut, tuple(broken))

    def _shard(self, digest: bytes) -> int:
        return int.from_bytes(digest[8:], "big") % len(self._tables)


def block_of(result_text: str) -> str:
    """The block an answer becomes. The client names the field and strips; an empty one it omits."""
    client_text = f"result: \n{result_text}".strip() if result_text else ""
    return f"{RESULT_START}{client_text}\n{RESULT_END}"


def block_digest(block: str) -> bytes:
    """BLAKE2b of a block's UTF-8 form, composed (NFC) as the rollout's tokenizer composes it."""
    text = unicodedata.normalize("NFC", block).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest()


def _response(solution_str: str) -> int:
    """Where the response begins, as the scorer finds it."""
    place = -len(THINK)
    for _ in range(THINKS_OF_THE_PROMPT + 1):
        place = solution_str.find(THINK, place + len(THINK))
        if place < 0:
            raise errors.TEMPLATE_DIFFERS(
                "the text of a rollout has no fourth <think>, where the response begins: the chat "
                "template differs from the pinned one"
            )
    return place


def _place(table: bytearray, digest: bytes) -> int:
    """The offset of a digest, or of the free slot it would go to: a table is never full."""
    slots = len(table) // DIGEST_BYTES
    slot = int.from_bytes(digest[:8], "big") % slots
    while True:
        place = slot * DIGEST_BYTES
        held = table[place : place + DIGEST_BYTES]
        if held in (digest, _FREE):
            return place
        slot = (slot + 1) % slots


def _grown(table: bytearray, slots: int) -> bytearray:
    grown = bytearray(slots * DIGEST_BYTES)
    for place in range(0, len(table), DIGEST_BYTES):
        held = bytes(table[place : place + DIGEST_BYTES])
        if held != _FREE:
            there = _place(grown, held)
            grown[there : there + DIGEST_BYTES] = held
    return grown
