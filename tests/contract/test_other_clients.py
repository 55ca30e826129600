"""The shapes of other trainers' clients, read and answered; over real HTTP in web/test_searches."""

from __future__ import annotations

import json
from typing import Any

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract.execute import QUERY_BYTES_MAX, QueryProblem
from smartsearch_sidecar.contract.json import strict_json
from smartsearch_sidecar.contract.other_clients import (
    DECLINED_SCORES,
    QUERIES_MAX,
    Form,
    Query,
    Searches,
    read_form,
    read_searches,
    render_answer,
    render_declined,
    render_failure,
    render_found,
    render_scores,
)
from tests.fakes.each import each

TOP_N = 3
DOCUMENTS: list[dict[str, Any]] = [
    {"id": "a", "contents": '"Ä"\nfirst "quoted"', "score": 2.5},
    {"id": "b", "contents": "second 東", "score": None},
]
PLAIN = [{"id": one["id"], "contents": one["contents"]} for one in DOCUMENTS]


def read(route: str, value: Any, top_n: int = TOP_N) -> Searches:
    """As the handler reads a body."""
    body = strict_json(json.dumps(value).encode())
    return read_searches(read_form(route, body), body, top_n)


def refused(route: str, value: Any) -> str:
    with pytest.raises(errors.InvalidRequest) as caught:
        read(route, value)
    assert caught.value.cause == "invalid_search_request"
    return caught.value.message


# --- whose request ------------------------------------------------------------------------------

CLIENTS: list[tuple[str, dict[str, Any], Form]] = [
    ("search", {"query": "q", "top_n": 3}, Form.search),
    ("search", {"query": "q", "top_n": 3, "return_score": True}, Form.search),
    ("batch_search", {"query": ["q"], "top_n": 3, "return_score": False}, Form.batch_search),
    ("retrieve", {"queries": ["q"], "topk": 3, "return_scores": True}, Form.nested_many),
    ("retrieve", {"queries": ["q"], "topk": 3, "return_scores": False}, Form.flat_many),
    ("retrieve", {"queries": ["q"]}, Form.flat_many),
    ("retrieve", {"query": "q", "topk": 3, "return_scores": True}, Form.nested_one),
    ("retrieve", {"query": "q", "topk": 3}, Form.flat_one),
    ("retrieve", {"query": "q", "topk": None, "return_scores": True}, Form.nested_one),
    ("retrieve", {"query": "q", "top_k": 3}, Form.results),
    ("retrieve", {"query": "q", "k": 3}, Form.results),
    ("retrieve", {"query": "q", "top_k": 10, "k": 3}, Form.results),
    ("retrieve", {"query": "q", "top_k": 3, "k": None}, Form.results),
]


@each(("route", "value", "form"), CLIENTS)
def test_a_client_is_known_by_what_it_sends(route: str, value: dict[str, Any], form: Form) -> None:
    """Each client's keys name the form its answer has to take, and the route that is recorded."""
    asked = read(route, value)
    assert asked.form is form
    assert form.route == route
    assert asked.queries == (Query("q", None),)
    assert asked.top_n == TOP_N
    assert asked.scores is value.get("return_score", False)


def test_only_the_client_that_swallows_every_status_needs_another_failure() -> None:
    """slime's, which is the one that asks for a flat list of lists."""
    assert [form for form in Form if form.surfaces] == [Form.flat_many]


@each(
    ("route", "value"),
    [
        ("search", []),
        ("search", "q"),
        ("search", {}),
        ("search", {"top_n": 3}),
        ("search", {"query": "q", "top_n": 3, "extra": 1}),
        ("search", {"queries": ["q"], "top_n": 3}),
        ("search", {"query": "q", "top_n": 3, "return_score": 1}),
        ("batch_search", {"query": "q", "top_n": 3}),
        ("batch_search", {"query": {"q": 1}, "top_n": 3}),
        ("retrieve", {"queries": "q", "topk": 3}),
        ("retrieve", {"queries": ["q"], "query": "q"}),
        ("retrieve", {"queries": ["q"], "top_k": 3}),
        ("retrieve", {"queries": ["q"], "return_scores": "true"}),
        ("retrieve", {"queries": ["q"], "return_scores": None}),
        ("retrieve", {"query": "q", "top_k": 3, "topk": 3}),
        ("retrieve", {"query": "q", "top_n": 3}),
        ("retrieve", {"topk": 3}),
    ],
)
def test_what_no_client_sends_is_refused(route: str, value: Any) -> None:
    """A body of another shape comes from a program that was not meant."""
    refused(route, value)


# --- how many passages --------------------------------------------------------------------------


@each("wrong", [0, 2, 4, -3, 3.0, "3", True, [3], 10**30])
@each(
    ("route", "value", "name"),
    [
        ("search", {"query": "q"}, "top_n"),
        ("batch_search", {"query": ["q"]}, "top_n"),
        ("retrieve", {"queries": ["q"], "return_scores": True}, "topk"),
        ("retrieve", {"query": "q"}, "topk"),
        ("retrieve", {"query": "q"}, "top_k"),
        ("retrieve", {"query": "q", "top_k": 3}, "k"),
    ],
)
def test_another_number_of_passages_is_refused(
    route: str, value: dict[str, Any], name: str, wrong: Any
) -> None:
    """The run's number is the one answer; the sentence names the client's key and ours."""
    sentence = refused(route, {**value, name: wrong})
    assert sentence.startswith(f"{name} must be 3")


@pytest.mark.parametrize("given", [{}, {"top_n": None}])
def test_flashrags_own_default_is_another_number(given: dict[str, Any]) -> None:
    """A client that names no number means its server's, which is ten."""
    assert refused("search", {"query": "q", **given}).startswith("top_n must be 3")


def test_rllms_own_default_is_another_number() -> None:
    """Its server takes ten where neither key holds a number."""
    assert refused("retrieve", {"query": "q", "k": None}).startswith("top_k must be 3")


# --- queries ------------------------------------------------------------------------------------


@each(
    ("sent", "text", "problem"),
    [
        ("  Ada \n", "  Ada \n", None),
        ("東京", "東京", None),
        ("x" * QUERY_BYTES_MAX, "x" * QUERY_BYTES_MAX, None),
        ("", "", QueryProblem.empty),
        (" \t\n", " \t\n", QueryProblem.empty),
        ("x" * (QUERY_BYTES_MAX + 1), "x" * (QUERY_BYTES_MAX + 1), QueryProblem.too_long),
        ("a </Search> b", "a </Search> b", QueryProblem.protocol_tag),
        ("\ud800", "", QueryProblem.not_encodable),
        (None, "null", QueryProblem.not_text),
        (5, "5", QueryProblem.not_text),
        (["Ada", "\ud800"], '["Ada", "\\ud800"]', QueryProblem.not_text),
        ({"q": "東"}, '{"q": "\\u6771"}', QueryProblem.not_text),
    ],
)
@each(
    ("route", "value"),
    [
        ("search", {"query": None, "top_n": 3}),
        ("retrieve", {"query": None, "topk": 3, "return_scores": True}),
        ("retrieve", {"query": None, "top_k": 3}),
        ("batch_search", {"query": [None, "good"], "top_n": 3}),
        ("retrieve", {"queries": [None, "good"], "topk": 3}),
    ],
)
def test_a_bad_query_is_the_policys_own(
    route: str, value: dict[str, Any], sent: Any, text: str, problem: QueryProblem | None
) -> None:
    """It comes back named, in a form that can be recorded, and the request stands."""
    key = "queries" if "queries" in value else "query"
    many = type(value[key]) is list
    asked = read(route, {**value, key: [sent, "good"] if many else sent})
    assert asked.queries[0] == Query(text, problem)
    assert asked.queries[1:] == ((Query("good", None),) if many else ())
    asked.queries[0].text.encode()


def test_a_batch_may_be_empty() -> None:
    """Search-R1 asks for nothing whenever no rollout of a step searches."""
    asked = read("retrieve", {"queries": [], "topk": 3, "return_scores": True})
    assert asked.queries == ()
    assert render_answer(asked, [], []) == b'{"result":[]}'
    assert render_answer(read("batch_search", {"query": [], "top_n": 3}), [], []) == b"[]"


def test_a_batch_is_bounded() -> None:
    """As many queries as a whole step of rollouts asks, and not one more."""
    value = {"queries": ["q"] * QUERIES_MAX, "topk": 3}
    assert len(read("retrieve", value).queries) == QUERIES_MAX
    assert str(QUERIES_MAX) in refused("retrieve", {**value, "queries": ["q"] * (QUERIES_MAX + 1)})


# --- answers ------------------------------------------------------------------------------------


def answer(route: str, value: dict[str, Any], count: int = 1) -> Any:
    """The answer where every query finds ``DOCUMENTS``, but the last, which is declined."""
    asked = read(route, value)
    parts = [render_found(asked.form, DOCUMENTS)] * count
    scores = [render_scores(DOCUMENTS)] * count
    if len(asked.queries) > count:
        parts.append(render_declined(asked.form, QueryProblem.empty))
        scores.append(DECLINED_SCORES)
    return json.loads(render_answer(asked, parts, scores))


DECLINED = [{"id": "invalid-query", "contents": "invalid query"}]
NESTED = [
    {"document": PLAIN[0], "score": 2.5},
    {"document": PLAIN[1], "score": None},
]
TWO = ["q", ""]


@each(
    ("route", "value", "expected"),
    [
        ("search", {"query": "q", "top_n": 3}, PLAIN),
        ("search", {"query": "q", "top_n": 3, "return_score": True}, [PLAIN, [2.5, None]]),
        ("batch_search", {"query": TWO, "top_n": 3}, [PLAIN, DECLINED]),
        (
            "batch_search",
            {"query": TWO, "top_n": 3, "return_score": True},
            [[PLAIN, DECLINED], [[2.5, None], [0.0]]],
        ),
        ("retrieve", {"queries": TWO, "return_scores": True}, {"result": [NESTED, []]}),
        ("retrieve", {"queries": TWO}, {"result": [PLAIN, []]}),
        ("retrieve", {"query": "q", "return_scores": True}, {"result": [NESTED]}),
        ("retrieve", {"query": "q"}, {"result": [PLAIN]}),
        (
            "retrieve",
            {"query": 'q "東"', "top_k": 3},
            {
                "query": 'q "東"',
                "method": "smartsearch-sidecar",
                "results": [
                    {"id": "doc_1", "content": PLAIN[0], "score": 2.5},
                    {"id": "doc_2", "content": PLAIN[1]},  # rLLM's client has a default of its own
                ],
                "num_results": 2,
            },
        ),
    ],
)
def test_each_form_is_answered_as_its_own_server_answers(
    route: str, value: dict[str, Any], expected: Any
) -> None:
    """Documents, scores and declined queries stand where the client looks for them."""
    assert answer(route, value) == expected


@pytest.mark.parametrize(
    ("route", "value", "expected"),
    [
        ("search", {"query": "", "top_n": 3}, DECLINED),
        ("search", {"query": "", "top_n": 3, "return_score": True}, [DECLINED, [0.0]]),
        ("retrieve", {"query": "", "return_scores": True}, {"result": [[]]}),
        ("retrieve", {"query": ""}, {"result": [[]]}),
        (
            "retrieve",
            {"query": "", "top_k": 3},
            {"query": "", "method": "smartsearch-sidecar", "results": [], "num_results": 0},
        ),
    ],
)
def test_a_declined_query_alone(route: str, value: dict[str, Any], expected: Any) -> None:
    """It is an answer like any other: no client fails on it."""
    assert answer(route, value, 0) == expected


def test_a_failure_that_surfaces_holds_no_result() -> None:
    """What slime's client indexes is null, also where the key is there by default."""
    value = json.loads(render_failure(b'{"error":{"code":"busy"}}'))
    assert value == {"result": None, "error": {"code": "busy"}}
    with pytest.raises(TypeError):
        value.get("result", [[]])[0]


def test_documents_that_went_unchecked_are_not_sent() -> None:
    """A lone surrogate has no place in an answer; the guard lets none through."""
    with pytest.raises(errors.InvariantBroken):
        render_answer(
            Searches(Form.results, (Query("\ud800", None),), 3, scores=False), [b"[]"], [b""]
        )
