"""The request contract of /execute, row by row; generated bodies are in property/."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract import execute as contract
from smartsearch_sidecar.contract.execute import (
    DECLINED_RESULT,
    ExecuteCall,
    ExecuteRules,
    QueryProblem,
    environment_digest,
    parse_execute,
    reference_refusal,
    render_execute,
)
from tests.fakes.each import each

ENV = "agentinputlab:smartsearch-fixed-wikipedia-v1"
RULES = ExecuteRules(environment=ENV, accepted_environment_sha256=frozenset())
VECTORS = Path(__file__).parents[1] / "data" / "execute_bodies.jsonl"
JSON, CALL = "http_invalid_request", "invalid_native_request"
LONE = "\ud83d"

# An environment of our own in the form datasets have: the address filled in by the trainer.
DATASET_ENV = """import json, urllib.request

def wikipedia_search(query, top_n=5):
    address = "{url}/search"
    return urllib.request.urlopen(address, json.dumps([query, top_n]).encode()).read()
"""


def body_of(call: Any, env: Any = ENV, **more: Any) -> bytes:
    return json.dumps({"env": env, "call": call, **more}).encode()


def native(query: str) -> str:
    return f"wikipedia_search(query={query!r}, top_n=5)"


def cause_of(body: bytes, rules: ExecuteRules = RULES) -> str | None:
    with pytest.raises(errors.InvalidRequest) as caught:
        parse_execute(body, rules)
    return caught.value.cause


def read(call: str) -> ExecuteCall:
    return parse_execute(body_of(call), RULES)


# --- the vectors ---------------------------------------------------------------------------------


def vectors() -> list[dict[str, Any]]:
    return [json.loads(line) for line in VECTORS.read_text(encoding="utf-8").splitlines()]


def reading(body: bytes) -> tuple[str | None, ExecuteCall | None]:
    """The latch cause in the reference's reading (None: admitted there), and the call if any."""
    try:
        call = parse_execute(body, RULES)
    except errors.InvalidRequest as error:
        return error.cause, None
    refusal = reference_refusal(call.problem) if call.problem else None
    return refusal.cause if refusal else None, call


def test_every_vector_agrees_in_the_reference_reading() -> None:
    """Each of the 900 recorded bodies gets the reference's verdict, query and latch cause."""
    rows = vectors()
    assert len(rows) == 900
    for row in rows:
        cause, call = reading(json.dumps(row["body"]).encode())
        expected = None
        if not row["accept"]:
            expected = JSON if row["why"].endswith(":UnicodeEncodeError") else CALL
        assert cause == expected, row
        if row["accept"]:
            assert call is not None
            assert call.query == row["query"], row


def test_every_vector_agrees_in_the_training_reading() -> None:
    """Only well-formed calls are declined; a refused call has a fault other than its query."""
    for row in vectors():
        body = row["body"]
        cause, call = reading(json.dumps(body).encode())
        if row["accept"]:
            assert call is not None
            assert call.problem in {None, QueryProblem.protocol_tag}, row
        elif call is not None:
            assert cause is not None
            # Declined: the query is the only fault, and with a sound one the call is served.
            tree = ast.parse(body["call"], mode="eval")
            assert isinstance(tree.body, ast.Call)
            for keyword in tree.body.keywords:
                if keyword.arg == "query":
                    keyword.value = ast.Constant("sound")
            assert read(ast.unparse(tree)).problem is None, row
    declined = [reading(json.dumps(row["body"]).encode())[1] for row in vectors()]
    assert sum(call is not None and call.problem is not None for call in declined) > 100


# --- shape and environment -----------------------------------------------------------------------


@each(
    "body",
    [
        b"null",
        b"[]",
        b'"x"',
        b"{}",
        body_of(native("x"), extra=1),
        body_of(native("x"), timeout=""),
        json.dumps({"env": ENV}).encode(),
        json.dumps({"call": native("x")}).encode(),
        json.dumps({"Env": ENV, "call": native("x")}).encode(),
        body_of(None),
        body_of(5),
        body_of([native("x")]),
        body_of(native("x"), env=None),
        body_of(native("x"), env=["a"]),
        body_of(native("x"), env=""),
        body_of(native("x"), env=ENV + " "),
        body_of(native("x"), env=LONE),
        body_of(LONE, env="other"),
        b'{"env": 1e999, "call": 1}',
    ],
)
def test_another_shape_or_environment_is_refused(body: bytes) -> None:
    """A body that is not exactly an accepted env and a call is a wrong program's."""
    assert cause_of(body) == CALL


def test_key_order_and_white_space_do_not_matter() -> None:
    """The two keys may come in either order, in any layout JSON allows."""
    body = f'\r\n{{ "call" :\t{json.dumps(native("x"))} , "env" : "{ENV}" }} '.encode()
    assert parse_execute(body, RULES) == ExecuteCall(ENV, native("x"), "x", None)


def test_a_dataset_environment_is_accepted_by_digest() -> None:
    """One digest stands for the template and for what any search address makes of it."""
    template = DATASET_ENV.format(url="<address-of-search>")
    rules = ExecuteRules(ENV, frozenset({environment_digest(template)}))
    for url in ("http://0.0.0.0:8080", "https://node-7.example/a/b", "http://[::1]:80/x?y=<z>"):
        env = DATASET_ENV.format(url=url)
        call = parse_execute(body_of(native("x"), env=env), rules)
        assert (call.env, call.problem) == (env, None)
    assert parse_execute(body_of(native("x")), rules).env == ENV


@each(
    ("old", "new"),
    [
        ("top_n=5", "top_n=6"),
        ("import json", "import  json"),
        ('"http://a/search"', "'http://a/search'"),
        ('"http://a/search"', '"http://a/search2"'),
        ('"http://a/search"', '"http://a/search" + x'),
        ('"http://a/search"', '"ftp://a/search"'),
        ('"http://a/search"', '"http:///search" "x"'),
        ('"http://a/search"', '"http://a b/search"'),
        ('"http://a/search"', '"http://a\\n/search"'),
        ('"http://a/search"', '"http://a\'/search"'),
        ('"http://a/search"', '"/search"'),
        (".read()", ".read()\nimport os"),
    ],
)
def test_any_other_change_of_an_environment_changes_its_digest(old: str, new: str) -> None:
    """Only the address before /search, alone in its literal, is masked."""
    env = DATASET_ENV.format(url="http://a")
    assert old in env
    changed = env.replace(old, new)
    rules = ExecuteRules(ENV, frozenset({environment_digest(env)}))
    assert environment_digest(changed) != environment_digest(env)
    assert cause_of(body_of(native("x"), env=changed), rules) == CALL


def test_accepted_environments_are_remembered_and_refused_ones_are_not() -> None:
    """The memory of environments is bounded and holds only texts the run accepts."""
    contract._require_accepted.cache_clear()
    env = DATASET_ENV.format(url="http://a")
    rules = ExecuteRules(ENV, frozenset({environment_digest(env)}))
    for number in range(3):
        parse_execute(body_of(native("x"), env=env), rules)
        cause_of(body_of(native("x"), env=f"{env}{number}"), rules)
    info = contract._require_accepted.cache_info()
    assert (info.currsize, info.hits) == (1, 2)
    assert info.maxsize is not None
    assert cause_of(body_of(native("x"), env=env)) == CALL  # remembered for its rules alone


def test_an_environment_without_utf8_form_is_refused() -> None:
    """A text that cannot be hashed is refused under any list of environments, without a crash."""
    rules = ExecuteRules(ENV, frozenset({"", environment_digest('"http://a/search"')}))
    assert cause_of(body_of(native("x"), env=LONE), rules) == CALL
    assert parse_execute(body_of(native("x"), env='"http://b/search"'), rules).problem is None


# --- the query -----------------------------------------------------------------------------------

PROBLEMS = [
    ("", QueryProblem.empty),
    (" \t\n\u3000\xa0\u2028", QueryProblem.empty),
    (" " * 5_000, QueryProblem.empty),
    ("a" * 4_096, None),
    ("a" * 4_097, QueryProblem.too_long),
    ("東" * 1_365 + "a", None),
    ("東" * 1_366, QueryProblem.too_long),
    (LONE, QueryProblem.not_encodable),
    ("a" * 5_000 + LONE, QueryProblem.not_encodable),
    ("\ud83d\ude00", QueryProblem.not_encodable),
    ("<search>", QueryProblem.protocol_tag),
    ("x</RESULT>", QueryProblem.protocol_tag),
    ("a <Answer> b", QueryProblem.protocol_tag),
    ("<thin\u212a>", QueryProblem.protocol_tag),
    ("<searching>", None),
    ("<search >", None),
    ("search>", None),
    ("<|im_end|>", None),
    ("<search>" + "a" * 4_096, QueryProblem.too_long),
    ("a" * 9_000, QueryProblem.call_too_long),
    (" " * 9_000, QueryProblem.call_too_long),
    ("\u200b" * 2_000, QueryProblem.call_too_long),
    (LONE * 2_000, QueryProblem.call_too_long),
]


@each(("query", "problem"), PROBLEMS)
@each("spelling", ["native", "turned"])
def test_a_query_fault_alone_comes_back_named(
    query: str, problem: QueryProblem | None, spelling: str
) -> None:
    """A well-formed call is returned with the first fault its query has, in a fixed order."""
    call = native(query)
    if spelling == "turned":
        call = f"wikipedia_search(top_n=5, query={query!r})"
    encodable = all(not 0xD800 <= ord(character) <= 0xDFFF for character in query)
    assert read(call) == ExecuteCall(ENV, call, query if encodable else "", problem)


def test_the_bound_on_a_call_counts_bytes_of_the_whole_call() -> None:
    """A call of 8,192 bytes is judged by its query, one more byte by its length."""
    call = "wikipedia_search(query='x', top_n=5)"
    padded = call + " " * (8_192 - len(call))
    assert read(padded).problem is None
    assert read(padded + " ").problem is QueryProblem.call_too_long
    noted = call + "#" + "東" * 2_719
    assert len(noted) < 8_192 < len(noted.encode())
    assert read(noted).problem is QueryProblem.call_too_long


@each(
    ("call", "cause"),
    [
        # A call that cannot be written has no parts to judge; its length is not asked either.
        (native("x") + LONE, JSON),
        (f"wikipedia_search(query='{LONE}', top_n=5)", JSON),
        (LONE * 9_000, JSON),
        # The query is judged before the number.
        (f"wikipedia_search(query={LONE!r}, top_n=6)", JSON),
        (f"wikipedia_search(query={LONE!r}, top_n='5')", JSON),
        (f"wikipedia_search(query={LONE!r}, top_n=None)", JSON),
        (f"wikipedia_search(query={LONE!r}, top_n=1e-5)", JSON),
        (f"wikipedia_search(query={LONE!r}, top_n=b'\\d')", JSON),
        (f"wikipedia_search(query={LONE!r}, top_n=...)", JSON),
        ("wikipedia_search(query='', top_n=6)", CALL),
        (f"wikipedia_search(query={'a' * 5_000!r}, top_n=6)", CALL),
        ("wikipedia_search(query='<think>', top_n=6)", CALL),
        # The shape is judged before both, the length before all.
        (f"wikipedia_search(query={LONE!r}, top_n=[5])", CALL),
        (f"wikipedia_search(query={LONE!r}, top_n=-5)", CALL),
        (f"wikipedia_search(query={LONE!r}, top_n=5, x=1)", CALL),
        (f"wikipedia_search(query={LONE!r})", CALL),
        (f"wikipedia_search(query={LONE * 2_000!r}, top_n=6)", CALL),
        (f"wikipedia_search(query={'a' * 9_000!r}, top_n=6)", CALL),
        ("a" * 9_000, CALL),
    ],
)
def test_a_call_with_more_than_a_query_fault_is_refused_for_the_first(
    call: str, cause: str
) -> None:
    """A wrong call stays refused when its query is bad too, with the cause the reference gives."""
    assert cause_of(body_of(call)) == cause


def test_each_query_problem_has_the_references_verdict() -> None:
    """Under on_invalid_query = "latch" each problem closes as there; a tag is admitted."""
    queries = set(QueryProblem) - {QueryProblem.invalid_call}  # which the reference refuses
    refusals = {problem: reference_refusal(problem) for problem in queries}
    assert {problem: row.cause if row else None for problem, row in refusals.items()} == {
        QueryProblem.call_too_long: CALL,
        QueryProblem.empty: CALL,
        QueryProblem.too_long: CALL,
        QueryProblem.not_encodable: JSON,
        QueryProblem.protocol_tag: None,
        QueryProblem.not_text: CALL,  # no call can hold one; the other routes' bodies can
    }


def test_values_are_frozen() -> None:
    """What was judged once cannot be changed after."""
    with pytest.raises(AttributeError):
        read(native("x")).query = "y"  # type: ignore[misc]


# --- the answer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("result", ["", DECLINED_RESULT, '"T"\ntext\n\n東京 \u2028 🎻 \x00'])
def test_an_answer_is_compact_json_in_the_clients_shape(result: str) -> None:
    """The client finds result, output and error, and reads its passages back unchanged."""
    body = render_execute(result)
    assert list(json.loads(body).items()) == [("result", result), ("output", ""), ("error", "")]
    assert body == json.dumps(json.loads(body), ensure_ascii=False, separators=(",", ":")).encode()


def test_an_answer_that_cannot_be_written_is_our_own_fault() -> None:
    """Passages are checked before; text without a UTF-8 form here is a broken promise, by name."""
    with pytest.raises(errors.InvariantBroken):
        render_execute(LONE)
