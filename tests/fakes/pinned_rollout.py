"""The pinned trainer's rollout, token by token: segments, calls, blocks, limits and refinement.

Written after its behaviour. A segment ends at ``</search>``, whose last token is replaced; the last
call of a valid segment is asked; its block is encoded and follows at once; the response is cut at
its length. A finished response is decoded without special tokens, one query in it is refined, all
before it is encoded again, and the rollout goes on from there.
"""

from __future__ import annotations

import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tests.fakes import rollouts
from tests.fakes.qwen_bpe import Bpe

Ask = Callable[[str], Awaitable[str]]
"""A query to the text that the client came back with."""

_CALL = re.compile(r"<search>((?:(?!</search>).)*)</search>", re.DOTALL)

QUERIES = (
    *("Faust opera", "Charles Gounod birthplace", "who wrote it", "  padded  ", "The Who"),
    *("Café de la Paix", "Cafe\u0301 de la Paix", "東京 タワー", "שלום", "🎭 opera", "o\u0338re"),
    *("nothing", "nothing at all", "a < b > c", "<b>bold</b> words", 'say "hello"', "it's \\n"),
    *("two\nlines", "tab\there", "result: \nParis", "<|object_ref_start|>Paris<|object_ref_end|>"),
    *("half <|box_start|> special", "\u0338begins with a mark", "\ufffd broken", "[INST] words"),
)
WRONG_QUERIES = ("", "  \n", "a <result> b", "<answer>x</answer>", "</THINK>", "word " * 1200)
THOUGHTS = (
    *(" I wonder. ", "\nSo: 東京, é, e\u0301.\n", " \u1100\u1161 <|box_start|> so ", ""),
    *(" A list:\n1. one\n\n2. two\n", " hm, hm ", " I recall <result>x</result>"),
)
OVERSHOOTS = ("", "\n", "\n\n", "</", ">", " and more")


@dataclass
class Played:
    """One rollout: its prompt's and its response's tokens; ``mask`` is 0 where a block stands."""

    prompt: list[int]
    response: list[int]
    mask: list[int] = field(default_factory=list)


@dataclass
class PinnedRollout:
    """Plays rollouts; ``draw`` is the policy and the refining model."""

    bpe: Bpe
    ask: Ask
    draw: random.Random
    response_length: int = 4096
    turns_max: int = 5

    def prompt(self, question: str, *, lost: int = 0) -> list[int]:
        """The tokens of a prompt, ``lost`` of them truncated at its left."""
        return self.bpe.encode(rollouts.prompt(question))[lost:]

    async def play(self, prompt: list[int]) -> Played:
        """A rollout from its beginning."""
        played = Played(prompt, [])
        await self._go_on(played, self.turns_max)
        return played

    async def refine(self, before: Played) -> Played | None:
        """The rollout with one of its queries refined; ``None`` where the trainer makes none."""
        text = self.bpe.decode(before.response, skip_specials=True)
        ends = [found.end() for found in re.finditer("</result>", text)]
        mask = [*before.mask, *([0] if len(before.mask) < self.response_length else [])]
        turned = [at for at in range(1, len(mask)) if (mask[at - 1], mask[at]) == (1, 0)][:-1]
        if not ends or len(ends) != len(turned):
            return None
        context = text[: self.draw.choice(ends)]
        context = context[: context.rfind("<result>")]
        calls = list(re.finditer("(<search>)(.*?)(</search>)", context, re.DOTALL))
        if not calls:
            return None
        start, end = calls[-1].span(2)
        refined = self.draw.choice(QUERIES).strip()
        prefix = self.bpe.encode(context[:start] + refined + context[end:])
        played = Played(before.prompt, prefix, [1] * len(prefix))
        calls_of_all = self._call(self.bpe.decode([*played.prompt, *prefix]))
        if calls_of_all is not None:
            await self._write_block(played, calls_of_all)
        if self._is_full(played) or calls_of_all is None:
            return played
        await self._go_on(played, self.turns_max - 1)
        return played

    def text(self, played: Played) -> str:
        """What the scorer is given: prompt and response decoded together."""
        return self.bpe.decode([*played.prompt, *played.response])

    async def _go_on(self, played: Played, turns: int) -> None:
        for _ in range(turns):
            wrote = self.bpe.written(self._segment())
            tokens = self.bpe.stopped(wrote, "</search>")
            called = "</search>" in self.bpe.decode(tokens)
            if called:
                tokens = tokens[:-1] + self.bpe.encode("</search>")[-1:]
            played.response += tokens
            played.mask += [1] * len(tokens)
            query = self._call(self.bpe.decode(tokens)) if called else None
            if query is not None:
                await self._write_block(played, query)
            if self._is_full(played) or query is None:
                return

    async def _write_block(self, played: Played, query: str) -> None:
        tokens = self.bpe.encode(rollouts.block(await self.ask(query)))
        played.response += tokens
        played.mask += [0] * len(tokens)

    def _is_full(self, played: Played) -> bool:
        full = len(played.response) >= self.response_length
        del played.response[self.response_length :]
        del played.mask[self.response_length :]
        return full

    def _call(self, text: str) -> str | None:
        """The query that is asked, where the tags are in pairs."""
        starts, ends = (
            [found.start() for found in re.finditer(tag, text)] for tag in ("<search>", "</search>")
        )
        pairs = zip(starts, ends, strict=False)
        if len(starts) != len(ends) or any(start >= end for start, end in pairs):
            return None
        calls = _CALL.findall(text)
        return calls[-1].strip() if calls else None

    def _segment(self) -> str:
        """What the policy writes next, up to and past where it is stopped."""
        draw = self.draw
        thought = draw.choice(THOUGHTS)
        kind = draw.random()
        if kind < 0.2:
            return f"{thought}</think>{rollouts.final('Paris').partition('</think>')[2]}"
        if kind < 0.23:
            return f"{thought}</think><search>a <search>Faust opera</search>"
        if kind < 0.25:
            return f"{thought} no call</search>"
        query = draw.choice(WRONG_QUERIES if draw.random() < 0.12 else QUERIES)
        space = draw.choice(("", " ", "\n"))
        over = draw.choice(OVERSHOOTS)
        return f"{thought}</think>\n<search>{space}{query}{space}</search>{over}"
