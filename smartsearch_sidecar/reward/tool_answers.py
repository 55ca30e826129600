"""Which answers of a tool loop stand in the rollout's text: verl's form, ``<tool_response>``.

Here the text alone does not say who wrote a block: decoded without special tokens, a block that
the policy made up looks like the environment's. So the search tool hands over what it answered
beside the text, on a way that the policy does not reach (``integrations/verl_search_tool.py``), and
each of these answers must

- be an answer that this run gave to that query, and
- stand in a ``<tool_response>`` of the response, in the order of the calls, by digest.

A missing one means that something else stands where the answer belongs. Blocks without an answer
are the policy's own, or verl's word on a call that reached no tool: counted, never refused.

verl cuts a long answer and says so in the text, and the response's limit may cut the last block.
For such an answer the trainer sends the whole text, which is held against the run's answers; what
is left of it must be its beginning, its end, or both.

Apart from ``provenance.py``, since nothing here is told by the text's own form.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Final, NamedTuple

from smartsearch_sidecar.contract.reward import ToolAnswer
from smartsearch_sidecar.reward.provenance import AnswerDigests, Judgement, block_of

ASSISTANT: Final = "<|im_start|>assistant\n"
BLOCK_START: Final = "<tool_response>"
BLOCK_END: Final = "</tool_response>"
CUT: Final = "(truncated)"  # in verl's words: "...(truncated)", "(truncated)...", or dots around it
DOTS: Final = "..."
KEPT_MIN: Final = 16
"""Characters that must be left of an answer that was cut: fewer show nothing."""
PEEK: Final = 64


class _Block(NamedTuple):
    """Where a block's content begins and ends; ``end`` is the text's end where nothing closes it.

    ``holds_another`` says that a further block opens before this one is closed.
    """

    place: int
    after: int
    end: int
    closed: bool
    holds_another: bool


def judge_tool_answers(
    answers: AnswerDigests, solution_str: str, handed: Sequence[ToolAnswer]
) -> Judgement:
    """Judges one rollout; ``handed`` are its answers in the order of the calls.

    ``judged`` counts ``handed``, and each of ``broken`` is the offset from which a missing answer
    was looked for.
    """
    blocks = _blocks(solution_str)
    at = cut = 0
    broken: list[int] = []
    for answer in handed:
        found = None
        # An answer that this run never gave is not looked for.
        if answer.result is None:
            found = _find_whole(answers, solution_str, blocks, at, answer)
        elif _given(answers, answer.query, answer.result):
            found = _find_cut(solution_str, blocks, at, _normal(answer.result))
        if found is None:
            broken.append(blocks[at].place if at < len(blocks) else len(solution_str))
        else:
            cut = int(not blocks[found].closed)
            at = found + 1
    own = len(blocks) - (len(handed) - len(broken))
    return Judgement(len(handed), own, cut, tuple(broken))


def why_broken(judgement: Judgement) -> str:
    """The sentence for a rollout with ``broken`` answers."""
    return (
        f"{len(judgement.broken)} of {judgement.judged} answers of the search tool do not stand in "
        "the rollout's <tool_response> blocks as this run gave them: something else stands there, "
        "or the chat template has other blocks (then set reward.provenance = off)"
    )


def _blocks(text: str) -> list[_Block]:
    """Every block of the response. Each opening tag counts: the policy may open one and never close
    it, and the environment's own comes after.
    """
    starts: list[int] = []
    place = text.find(BLOCK_START, max(text.find(ASSISTANT), 0))
    while place >= 0:
        starts.append(place)
        place = text.find(BLOCK_START, place + len(BLOCK_START))
    blocks = []
    end = 0
    for place, following in zip_longest(starts, starts[1:], fillvalue=len(text)):
        after = place + len(BLOCK_START)
        if 0 <= end < after:
            end = text.find(BLOCK_END, after)
        stop = end if end >= 0 else len(text)
        blocks.append(_Block(place, after, stop, end >= 0, following < stop))
    return blocks


def _find_whole(
    answers: AnswerDigests, text: str, blocks: Sequence[_Block], at: int, answer: ToolAnswer
) -> int | None:
    """Which block, from ``at`` on, is the answer's: the first with its digest."""
    for index in range(at, len(blocks)):
        block = blocks[index]
        if not block.closed or block.holds_another:
            continue
        content = _normal(text[block.after : block.end])
        digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()
        if digest == answer.sha256:
            return index if _given(answers, answer.query, content) else None
    return None


def _find_cut(text: str, blocks: Sequence[_Block], at: int, whole: str) -> int | None:
    """Which block, from ``at`` on, holds ``whole`` or what was left of it: the first that can."""
    for index in range(at, len(blocks)):
        after = blocks[index].after
        if _may_be(text[after : after + PEEK].lstrip(), whole):
            for end, closed in _ends(text, after, 4 * len(whole) + PEEK):
                if _is_of(_normal(text[after:end]), whole, closed=closed):
                    return index
    return None


def _ends(text: str, after: int, most: int) -> Iterator[tuple[int, bool]]:
    """Where a block may end: at a closing tag, of which a passage may hold some, or unclosed."""
    limit = after + most
    end = text.find(BLOCK_END, after, limit)
    while end >= 0:
        yield end, True
        end = text.find(BLOCK_END, end + len(BLOCK_END), limit)
    if len(text) <= limit:
        yield len(text), False


def _may_be(content: str, whole: str) -> bool:
    # The policy may write thousands of tags, each with a text behind it that is as long as the
    # rollout: those that do not even begin alike are not read.
    beginning = unicodedata.normalize("NFC", content)[:1]
    return beginning in (whole[:1], CUT[0], DOTS[0], BLOCK_END[0], "")


def _given(answers: AnswerDigests, query: str, result: str) -> bool:
    """Whether this run gave ``result`` to ``query``."""
    return answers.has(query, block_of(result))


def _normal(text: str) -> str:
    """As a tokenizer composes it, without the white space that a template puts around it."""
    return unicodedata.normalize("NFC", text).strip()


def _is_of(content: str, whole: str, *, closed: bool) -> bool:
    """Whether a block's content is ``whole``, or what verl or the response's limit left of it."""
    if content == whole or (not closed and _begins(f"{whole}\n{BLOCK_END}", content)):
        return True
    place = content.find(CUT)
    while place >= 0:
        head, tail = content[:place], content[place + len(CUT) :]
        # verl's three forms: what it left at the beginning, at the end, or at both.
        marked = head.endswith(DOTS) and len(head) > len(DOTS) if head else tail.startswith(DOTS)
        head, tail = head.removesuffix(DOTS), tail.removeprefix(DOTS)
        fits = _finishes(whole, tail) or (not closed and tail in whole)
        if marked and len(head) + len(tail) >= KEPT_MIN and _begins(whole, head) and fits:
            return True
        place = content.find(CUT, place + 1)
    return False


# A cut may part a letter from its accents, or the letters of a Korean syllable. Either side then
# composes to what the whole text does not have there: that one character is not compared.


def _begins(whole: str, head: str) -> bool:
    end = len(head)
    while end and _joins(head[end - 1]):
        end -= 1
    return whole.startswith((head, head[: max(end - 1, 0)]))


def _finishes(whole: str, tail: str) -> bool:
    start = 0
    while start < len(tail) and _joins(tail[start]):
        start += 1
    return whole.endswith((tail, tail[start:]))


def _joins(char: str) -> bool:
    """Whether a character may compose with the one before it."""
    return unicodedata.combining(char) > 0 or "\u1160" <= char <= "\u11ff"
