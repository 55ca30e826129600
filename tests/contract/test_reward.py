"""The shapes of /reward and /reward/batch; generated bodies are in property/."""

from __future__ import annotations

import json
from typing import Any

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract.reward import RewardItem, parse_reward, parse_reward_batch
from tests.fakes.each import each

SOLUTION = '<|im_start|>user\nWho?<|im_end|>\n<think>it\'s "him"</think> 東京 🎻'
GOOD = {"solution_str": SOLUTION, "ground_truth": ["Ada", "Lovelace"]}
SHAPE, JSON = "invalid_reward_request", "http_invalid_request"


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in GOOD.items() if name != key}


def refusal_of_item(body: Any) -> errors.InvalidRequest:
    with pytest.raises(errors.InvalidRequest) as caught:
        parse_reward(body if isinstance(body, bytes) else json.dumps(body).encode())
    return caught.value


def refusal_of_batch(body: Any, rows_max: int = 3) -> errors.InvalidRequest:
    with pytest.raises(errors.InvalidRequest) as caught:
        parse_reward_batch(body if isinstance(body, bytes) else json.dumps(body).encode(), rows_max)
    return caught.value


@each(
    ("truth", "held"),
    [
        ("Ada", "Ada"),
        (" ", " "),
        (["Ada"], ("Ada",)),
        (["Ada", "Ada"], ("Ada", "Ada")),
        (["東京", "e\u0301"], ("東京", "e\u0301")),
    ],
)
@each("source", [{}, {"data_source": "re_call"}])
def test_an_item_is_read_verbatim(truth: Any, held: Any, source: dict[str, str]) -> None:
    """Text and answers come back as sent, one answer told apart from a list of one."""
    body = {**source, "ground_truth": truth, "solution_str": SOLUTION}
    assert parse_reward(json.dumps(body).encode()) == RewardItem(SOLUTION, held, "re_call")


def test_an_empty_text_is_a_shape_like_any_other() -> None:
    """That a text has no user turn is for the scorer's room to say, not for the shape."""
    body = json.dumps({**GOOD, "solution_str": ""}).encode()
    assert parse_reward(body).solution_str == ""


BAD_ITEMS: list[Any] = [
    None,
    [],
    {},
    [GOOD],
    without("solution_str"),
    without("ground_truth"),
    {**GOOD, "extra": 1},
    {**GOOD, "data_source": "other"},
    {**GOOD, "data_source": None},
    {**GOOD, "data_source": ["re_call"]},
    {**GOOD, "solution_str": None},
    {**GOOD, "solution_str": ["x"]},
    {**GOOD, "solution_str": "secret\ud800"},
    {**GOOD, "ground_truth": None},
    {**GOOD, "ground_truth": ""},
    {**GOOD, "ground_truth": []},
    {**GOOD, "ground_truth": 0},
    {**GOOD, "ground_truth": {}},
    {**GOOD, "ground_truth": {"secret": 1}},
    {**GOOD, "ground_truth": ["secret", ""]},
    {**GOOD, "ground_truth": ["secret", 1]},
    {**GOOD, "ground_truth": [["secret"]]},
    {**GOOD, "ground_truth": "secret\udfff"},
    {**GOOD, "ground_truth": ["secret", "\ud800"]},
]


@each("item", BAD_ITEMS)
def test_a_bad_item_is_refused_without_its_texts(item: Any) -> None:
    """Any other shape is refused, alone or in a batch, and no text of it enters the message."""
    alone = refusal_of_item(item)
    batched = refusal_of_batch({"items": [GOOD, item, GOOD]})
    assert alone.cause == batched.cause == SHAPE
    assert batched.message == alone.message.replace("The body", "Item 2")
    assert "secret" not in alone.message
    assert "Ada" not in alone.message


def test_a_batch_keeps_its_order() -> None:
    """Rows come back in the order sent, up to the bound."""
    rows = [{**GOOD, "ground_truth": str(number)} for number in range(3)]
    items = parse_reward_batch(json.dumps({"items": rows}).encode(), 3)
    assert [item.ground_truth for item in items] == ["0", "1", "2"]


@each(
    "body",
    [
        [],
        [GOOD],
        GOOD,
        {},
        {"items": None},
        {"items": {}},
        {"items": GOOD},
        {"items": []},
        {"items": [GOOD] * 4},
        {"items": [GOOD], "more": 1},
        {"Items": [GOOD]},
    ],
)
def test_another_batch_is_refused(body: Any) -> None:
    """A batch is exactly one list of 1 to rows_max items."""
    assert refusal_of_batch(body).cause == SHAPE


@each(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b'{"solution_str": "a", "solution_str": "a", "ground_truth": "b"}',
        b'{"items": [{"solution_str": "a", "ground_truth": "b", "ground_truth": "c"}]}',
        b'{"items": [NaN]}',
        b"[" * 65 + b"]" * 65,
    ],
)
def test_rewards_are_read_from_strict_json(body: bytes) -> None:
    """What is not strict JSON has the cause it has on every route."""
    assert refusal_of_item(body).cause == refusal_of_batch(body).cause == JSON
