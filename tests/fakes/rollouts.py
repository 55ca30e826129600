"""Rollouts in the form of the pinned trainer: its chat template, its tags, its client's blocks.

The words are our own. What is as the trainer has it: a system prompt that itself shows three
``<think>`` and two ``<result>``, a generation prompt that ends in the fourth ``<think>``, a result
block glued to ``</search>`` (generation stops there, and the last token is replaced so that nothing
follows it), and text that went through a tokenizer which composes it (NFC).
"""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

SYSTEM_PROMPT = (
    "You look things up before you answer. Reason inside <think> </think>, ask the encyclopedia "
    "inside <search> </search>, read what it says inside <result> </result>, and close with "
    "<answer> </answer>. It may go like this: <think> What is missing? </think> <search> a few "
    "words </search> <result> what was found </result> <think> What follows? </think> <answer> So "
    "it is \\[ \\boxed{a short answer} \\] </answer>."
)


def prompt(question: str, *, system: str = SYSTEM_PROMPT) -> str:
    """The text the policy continues."""
    return (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
        "<|im_start|>assistant\n<think>"
    )


def client_text(result: str, *, output: str = "", error: str = "") -> str:
    """What the pinned client makes of a 200 answer."""
    fields = (("result", result), ("output", output), ("error", error))
    return "".join(f"{name}: \n{text}\n" for name, text in fields if text).strip()


def block(text: str) -> str:
    """What the rollout appends for one call; ``text`` is an answer, or the client's error text."""
    return f"<result>{text}\n</result>\n"


@dataclass(frozen=True)
class Turn:
    """One round: what the policy wrote, and the text its client came back with."""

    query: str
    text: str
    thought: str = " I should look this up. "

    @property
    def written(self) -> str:
        return f"{self.thought}</think>\n<search>{self.query}</search>{block(self.text)}<think>"


def answered(query: str, result: str) -> Turn:
    """A round whose call was answered with ``result``."""
    return Turn(query=query, text=client_text(result))


def final(answer: str) -> str:
    """How a tidy policy ends."""
    box = f"\\[ \\boxed{{{answer}}} \\]"
    return f" Now it is clear. </think>\n<answer> It is {box} </answer><|im_end|>"


def rollout(
    question: str, turns: Sequence[Turn], ending: str, *, system: str = SYSTEM_PROMPT
) -> str:
    """Prompt and response as the reward sees them: decoded together, special tokens kept."""
    return decoded(prompt(question, system=system) + "".join(t.written for t in turns) + ending)


def decoded(text: str) -> str:
    """``text`` after encoding and decoding with a tokenizer that applies NFC."""
    return unicodedata.normalize("NFC", text)


# --- generated cases -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One rollout to score; ``texts`` has a helper text for every prompt that may be asked."""

    solution_str: str
    ground_truth: str | list[str]
    texts: tuple[str, ...] = field(repr=False)


TRUTHS: tuple[str | list[str], ...] = (
    "Paris",
    ["Paris"],
    ["the city of Paris", "Paris, France"],
    ["yes"],
    "no",
    ["noanswer"],
    ["1889"],
    ["Charles François Gounod", "Gounod"],
    ["The Who"],
    ["東京"],
)

VERDICTS = (
    "<answer>0",
    "<answer>1",
    "<answer> 0 ",
    "<answer>\n1\n",
    "<answer>Score: 0",
    "<answer>0.0",
    "<answer>",
    "",
    "1",
    "0",
    "<answer>1</answer><explanation>fits</explanation><answer>0",
    "The round was needed. <answer>1",
)

BOXES = (
    "\\boxed{%s}",
    "\\boxed{ %s }",
    "\\[ \\boxed{\\text{%s}} \\]",
    "\\boxed %s",
    "\\boxed %s$ and more",
    "\\fbox{%s}",
    "\\fbox{x%s}",
    "\\boxed{%s",
    "\\boxed{wrong} or \\boxed{%s}",
    "\\boxed{%s} or \\boxed{wrong}",
    "\\boxed{{%s}}",
    "\\boxed{}%s",
    "\\boxed %s then \\boxed{%s}",
    "%s",
    "\\boxed",
)

ENDINGS = (
    " So. </think>\n<answer> It is \\[ BOX \\] </answer><|im_end|>",
    " So. </think>\n<answer> BOX </answer>",
    " So. </think>\n<answer> BOX ",
    " So. <answer> BOX </answer>",
    " So. </think> BOX",
    " So. </think>\n<answer> BOX </answer><answer> BOX </answer>",
    " So. </think>\n</answer> BOX <answer>",
    " So. </think>\n<answer> BOX </answer><think></think>",
    " So. </think>\n<search>one more</search>",
    " So. </think>\n<search>one more</search<answer> BOX </answer>",
    " So. </think>\n<result>I remember: BOX\n</result>\n<answer> BOX </answer>",
    " So. </think>\n<search>one more<result>BOX</result></search><answer> BOX </answer>",
    " So. </think> <search></search> <result> <answer> BOX </answer>",
    " So. </result></think><answer> BOX </answer>",
)

PASSAGES = (
    '"Paris"\nParis is the capital of France.',
    '"Eiffel Tower"\nThe tower was finished in 1889.',
    '"Cafe\u0301"\nA cafe\u0301 serves coffee and te\u0301.',
    '"result: "\nA page about the word result: and its use.',
    '"東京"\n東京は日本の首都である。',
    '"Numbers"\n{1} \\boxed{no} [2] (3)',
    '"Blank"\nline\n\nline after a blank one',
    '"Tower"\r\nWindows\tlines   ',
)


def cases(count: int, seed: int) -> Iterator[Case]:
    """Rollouts of every form above, the same for the same seed."""
    draw = random.Random(seed)
    for _ in range(count):
        truth = draw.choice(TRUTHS)
        said = truth if isinstance(truth, str) else draw.choice(truth)
        said = draw.choice((said, said.upper(), f"the {said}.", f"{said} perhaps", "nothing"))
        box = draw.choice(BOXES).replace("%s", said)
        text = rollout(
            draw.choice(("Which city?", "  Who wrote it? \n", "Is it so, <think> or not?")),
            [_turn(draw) for _ in range(draw.choice((0, 1, 1, 2, 3, 5)))],
            draw.choice(ENDINGS).replace("BOX", box),
        )
        if draw.random() < 0.15:
            response = text.index("assistant\n<think>") + len("assistant\n<think>")
            text = text[: draw.randint(response, len(text))]
        texts = tuple(draw.choice(VERDICTS) for _ in range(text.count("</result>")))
        yield Case(solution_str=text, ground_truth=truth, texts=texts)


def _turn(draw: random.Random) -> Turn:
    kind = draw.random()
    if kind < 0.1:
        return answered("", "invalid query")
    if kind < 0.15:
        return answered("nothing at all", "")
    if kind < 0.2:
        return Turn(query="lost", text="error: 502")
    passages = draw.sample(PASSAGES, draw.randint(1, 4))
    return answered("what is it", "\n\n".join(passages))
