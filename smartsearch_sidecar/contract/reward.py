"""Bytes to frozen values for ``POST /reward`` and ``POST /reward/batch``.

Only shapes are judged here. Whether a ground truth is the declared one, and whether the text has a
user turn, are questions for ``reward/``; no message holds a text or an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract.json import strict_json
from smartsearch_sidecar.run.json_values import is_sha256, is_text

DATA_SOURCE: Final = "re_call"
"""The one data source whose scorer is served; also what a missing ``data_source`` means."""

_REQUIRED: Final = frozenset({"solution_str", "ground_truth"})
_ALLOWED: Final = _REQUIRED | {"data_source", "tool_answers"}
_SOLUTION: Final = "must have text that can be written as UTF-8 for solution_str"
_TOOL_ANSWERS: Final = (
    "may have for tool_answers a list of objects, each of query and either sha256 (64 lower-case "
    "hex digits) or result, all text that can be written as UTF-8"
)
_TRUTH: Final = "must have text that can be written as UTF-8, or a list of it, for ground_truth"


class ToolAnswer(NamedTuple):
    """What a search tool handed over beside a rollout's text: the query, and its answer.

    ``sha256`` (64 hex) is of the answer in composed form, stripped; where the answer does not stand
    in the rollout word for word, ``result`` is its text in that place. One of the two is ``None``.
    """

    query: str
    sha256: str | None
    result: str | None


@dataclass(frozen=True, slots=True)
class RewardItem:
    """One rollout to score. Every text has a UTF-8 form.

    ``solution_str`` is prompt and response decoded together, verbatim, and may be empty;
    ``ground_truth`` is one answer, or a tuple of at least one, each not empty. ``tool_answers`` are
    those of a tool loop, in order, perhaps none; ``None`` where no tool loop made the rollout.
    """

    solution_str: str
    ground_truth: str | tuple[str, ...]
    data_source: str
    tool_answers: tuple[ToolAnswer, ...] | None = None


def parse_reward(body: bytes) -> RewardItem:
    """Read ``{"solution_str", "ground_truth", "data_source"?, "tool_answers"?}``.

    Raises: ``InvalidRequest`` with cause ``http_invalid_request`` (not strict JSON) or
    ``invalid_reward_request`` (another shape, or text that has no UTF-8 form).
    """
    item = _item(strict_json(body), "The body")
    _require_text([item], ["The body"])
    return item


def parse_reward_batch(body: bytes, rows_max: int) -> tuple[RewardItem, ...]:
    """Read ``{"items": [...]}``: one to ``rows_max`` items, in order, or none of them.

    Raises: ``InvalidRequest`` as ``parse_reward`` does; an item at fault is named by its number,
    counted from 1.
    """
    value = strict_json(body)
    if type(value) is not dict or value.keys() != {"items"} or type(value["items"]) is not list:
        raise _refuse("The body", "must be an object of exactly items, a list")
    rows = value["items"]
    if not 1 <= len(rows) <= rows_max:
        raise _refuse("items", f"must hold 1 to {rows_max} rows (reward.batch_max)")
    names = [f"Item {number}" for number in range(1, len(rows) + 1)]
    items = tuple(map(_item, rows, names))
    _require_text(items, names)
    return items


def _item(value: Any, name: str) -> RewardItem:
    if type(value) is not dict or not _REQUIRED <= value.keys() <= _ALLOWED:
        raise _refuse(
            name,
            "must be an object of solution_str, ground_truth and perhaps data_source, tool_answers",
        )
    if value.get("data_source", DATA_SOURCE) != DATA_SOURCE:
        raise _refuse(name, f'may name no data_source but "{DATA_SOURCE}"')
    solution, truth = value["solution_str"], value["ground_truth"]
    if type(solution) is not str:
        raise _refuse(name, _SOLUTION)
    answers = truth if type(truth) is list else [truth]
    if not answers or not all(answer and type(answer) is str for answer in answers):
        raise _refuse(name, _TRUTH)
    answered = _tool_answers(value["tool_answers"], name) if "tool_answers" in value else None
    truth = tuple(truth) if type(truth) is list else truth
    return RewardItem(solution, truth, DATA_SOURCE, answered)


def _tool_answers(value: Any, name: str) -> tuple[ToolAnswer, ...]:
    if type(value) is not list:
        raise _refuse(name, _TOOL_ANSWERS)
    for row in value:
        if type(row) is not dict or row.keys() not in ({"query", "sha256"}, {"query", "result"}):
            raise _refuse(name, _TOOL_ANSWERS)
        if not all(map(is_text, row.values())) or not is_sha256(row.get("sha256", "0" * 64)):
            raise _refuse(name, _TOOL_ANSWERS)
    return tuple(ToolAnswer(row["query"], row.get("sha256"), row.get("result")) for row in value)


def _require_text(items: Sequence[RewardItem], names: Sequence[str]) -> None:
    for name, item in zip(names, items, strict=True):
        if not is_text(item.solution_str):
            raise _refuse(name, _SOLUTION)
        truth = item.ground_truth
        if not all(map(is_text, (truth,) if isinstance(truth, str) else truth)):
            raise _refuse(name, _TRUTH)


def _refuse(name: str, fault: str) -> errors.InvalidRequest:
    return errors.INVALID_REWARD_REQUEST(f"{name} {fault}.")
