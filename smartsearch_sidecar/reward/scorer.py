"""The pinned scorer, run as it is, with its transport taken out.

All arithmetic, prompts and parsing stay the source's. What is changed is only where its functions
meet the world: ``generate_response`` is ours, ``print`` goes nowhere, and nothing but function
definitions of the file is executed (its imports are not).

Two passes: the verdicts do not influence which prompts are asked, so a first pass with placeholder
verdicts collects the prompts, the caller sends them side by side, and a second pass computes with
the answers and must ask for exactly the same prompts in the same order.

Blocking and pure: call it from a worker thread. Every call has a namespace of its own, so any
number of threads may score at once. The digest of the source on disk is the business of
``VerifiedSource.recheck``, asked before and after each score.
"""

from __future__ import annotations

import ast
import re
import string
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, Final, Literal, TypeAlias, Union

from smartsearch_sidecar import errors
from smartsearch_sidecar.reward.source import VerifiedSource

Answers: TypeAlias = str | Sequence[str]  # one string, or a sequence of them, as in the dataset

ENTRY: Final = "compute_score_with_format"
TRANSPORT: Final = "generate_response"
EXTRACTION: Final = "get_model_score"

STOP: Final = "</answer>"
"""What the helper stops at and therefore does not return; the source appends it to every text."""
_PLACEHOLDER: Final = f"<answer>0{STOP}"  # what the first pass answers; its rewards are thrown away


class Scorer:
    """Computes rewards with one verified source."""

    def __init__(self, source: VerifiedSource) -> None:
        self.source = source
        self._code = _functions(source)

    def collect_prompts(self, solution_str: str, ground_truth: Answers) -> tuple[str, ...]:
        """The prompts the scorer will ask, in order, without asking the helper. Raises
        ``TEMPLATE_DIFFERS`` where the scorer cannot read the text; ``SCORER_FAILED``.
        """
        prompts: list[str] = []

        def record(prompt: str) -> str:
            prompts.append(prompt)
            return _PLACEHOLDER

        _refuse_reason(self._run(record, solution_str, ground_truth))
        return tuple(prompts)

    def score(
        self, solution_str: str, ground_truth: Answers, answers: Sequence[tuple[str, str]]
    ) -> float:
        """The reward, given the helper's answers to the prompts of the first pass.

        Args:
            solution_str: prompt and response, decoded together, special tokens kept.
            ground_truth: the reference answers.
            answers: pairs of prompt and the helper's text (without the stop string), in order.

        Raises: ``PROMPTS_DIFFER`` where the scorer asked for other prompts, more, or fewer;
        ``TEMPLATE_DIFFERS``, ``SCORER_FAILED``, ``NONFINITE_REWARD``.
        """
        left = iter(answers)

        def replay(prompt: str) -> str:
            expected, text = next(left, (None, ""))
            if prompt != expected:
                raise errors.PROMPTS_DIFFER(
                    "the scorer's second pass asked another prompt than its first pass did at this "
                    "place; the source is not deterministic, score with reward.side_by_side = false"
                )
            return text + STOP

        value = self._run(replay, solution_str, ground_truth)
        if unused := len(list(left)):
            raise errors.PROMPTS_DIFFER(
                f"the scorer's second pass left {unused} of {len(answers)} prompts unasked; the "
                "source is not deterministic, score with reward.side_by_side = false"
            )
        return _reward(value)

    def score_serial(
        self, solution_str: str, ground_truth: Answers, ask: Callable[[str], str]
    ) -> float:
        """The reward in one pass, each prompt asked when the scorer asks it.

        ``ask`` gives the helper's text (without the stop string). What it raises ends the score and
        comes out of here unchanged, even if the source would swallow it.

        Raises: ``TEMPLATE_DIFFERS``, ``SCORER_FAILED``, ``NONFINITE_REWARD``.
        """
        return _reward(self._run(lambda prompt: ask(prompt) + STOP, solution_str, ground_truth))

    def verdict(self, text: str) -> Literal["0", "1", "other", "empty"]:
        """What the scorer reads in one helper text (without the stop string). It silently takes
        ``other`` and ``empty`` for correct.
        """
        if not text.strip():
            return "empty"
        functions = self._functions(lambda _prompt: text + STOP)
        found = self._call(functions[EXTRACTION], "")
        return "0" if found == "0" else "1" if found == "1" else "other"

    def _run(self, transport: Callable[[str], str], solution_str: str, answers: Answers) -> object:
        """One call of the entry. A failed transport is the outcome, even where the source goes on:
        the source's own transport swallows failures, and that raised rewards.
        """
        failed: list[BaseException] = []

        def guarded(prompt: str) -> str:
            if failed:
                raise failed[0]
            try:
                return transport(prompt)
            except BaseException as error:
                failed.append(error)
                raise

        # Over JSON a sequence is a list, and the prompts show it: a tuple must not read otherwise.
        truth = answers if isinstance(answers, str) else list(answers)
        entry = self._functions(guarded)[ENTRY]
        value: object = None
        try:
            value = self._call(entry, None, solution_str, truth)
        except errors.ScorerFailed:
            if not failed:
                raise
        if failed:
            raise failed[0]
        return value

    def _call(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Calls into the source. What it raises is named by type and line: its own message could
        hold the rollout or the reference answers.
        """
        try:
            return function(*arguments)
        except Exception as error:  # noqa: BLE001 - any failure of foreign code is one named failure
            file, steps = str(self.source.path), traceback.walk_tb(error.__traceback__)
            lines = [line for frame, line in steps if frame.f_code.co_filename == file]
            raise errors.SCORER_FAILED(
                f"the scorer raised {type(error).__name__} at line {lines[-1] if lines else None} "
                f"of {self.source.path.name}; no reward was made up"
            ) from None

    def _functions(self, transport: Callable[[str], str]) -> dict[str, Any]:
        names: dict[str, Any] = {
            "re": re,
            "string": string,
            "Counter": Counter,
            "Union": Union,
            "List": list,
            # The source prints each row's verdicts: in a server that is noise, and names rollouts.
            "print": lambda *_words, **_options: None,
            TRANSPORT: transport,
        }
        exec(self._code, names)  # noqa: S102 - function definitions of the source pinned by digest
        return names


def _functions(source: VerifiedSource) -> CodeType:
    """The function definitions of the source, compiled with its ``assert`` statements kept.

    Raises ``ScorerSourceError`` where it does not compile, or lacks a function we lean on.
    ``dont_inherit``: the future imports of this file are not the source's. ``optimize=0``: the
    source relies on ``assert`` to find a missing answer, so under ``-O`` its rewards change.
    """
    try:
        tree = ast.parse(source.text, filename=str(source.path))
    except (SyntaxError, ValueError) as error:
        raise errors.SCORER_SOURCE(
            f"the scorer's source {source.path} is not Python this interpreter can compile "
            f"({type(error).__name__}, line {getattr(error, 'lineno', None)})"
        ) from error
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    missing = {ENTRY, TRANSPORT, EXTRACTION} - {node.name for node in found}
    if missing:
        raise errors.SCORER_SOURCE(
            f"the scorer's source {source.path} has no function {', '.join(sorted(missing))}; "
            "pin the trainer's re_call.py"
        )
    kept: list[ast.stmt] = [node for node in found if node.name != TRANSPORT]
    module = ast.Module(body=kept, type_ignores=[])
    return compile(module, str(source.path), "exec", dont_inherit=True, optimize=0)


def _refuse_reason(value: object) -> None:
    """The source answers ``(0, reason)`` for a text it cannot read; the pinned trainer would train
    on that zero. The policy cannot cause it: user turn and fourth ``<think>`` are in the prompt.
    """
    if isinstance(value, tuple):
        reason = value[1] if len(value) > 1 and isinstance(value[1], str) else "no reason"
        raise errors.TEMPLATE_DIFFERS(
            f"the scorer cannot read this text ({reason[:80]}): the chat template differs from the "
            "pinned one, or special tokens were skipped in decoding"
        )


def _reward(value: object) -> float:
    _refuse_reason(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise errors.SCORER_FAILED(
            f"the scorer returned {type(value).__name__}, not a number; no reward was made up"
        )
    if not -sys.float_info.max <= value <= sys.float_info.max:
        raise errors.NONFINITE_REWARD("the scorer returned a number that is not finite")
    return float(value)
