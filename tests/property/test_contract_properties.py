"""Whatever arrives: the fast readers say what the exact ones say, and every verdict has a name."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract import execute
from smartsearch_sidecar.contract.execute import (
    ExecuteRules,
    QueryProblem,
    environment_digest,
    parse_execute,
    reference_refusal,
    render_execute,
)
from smartsearch_sidecar.contract.json import strict_json
from smartsearch_sidecar.contract.reward import parse_reward, parse_reward_batch

ENV = "agentinputlab:smartsearch-fixed-wikipedia-v1"
RULES = ExecuteRules(environment=ENV, accepted_environment_sha256=frozenset())
JSON, CALL = "http_invalid_request", "invalid_native_request"
EXAMPLES = settings().max_examples
T = TypeVar("T")

ANY_TEXT = st.text(st.characters(exclude_categories=()))
CHARACTERS = ["a", " ", "'", '"', "\\", "\n", "\r", "\t", "\0", "\x0c", "\x85", "\xa0", "\u2028"]
FRAGMENTS = ["é", "東", "🎻", "\ud83d", "\udc00", "{", "#", "<think>", "</Result>", "\\N", "x4"]
LIKELY_TEXT = st.lists(
    st.one_of(st.sampled_from(CHARACTERS), st.sampled_from(FRAGMENTS)), max_size=12
).map("".join)
TEXT = st.one_of(ANY_TEXT, LIKELY_TEXT)

# Pieces of calls, of near-calls and of Python at large, to be joined in any order.
NAMES = ["wikipedia_search", "query", "top_n", "\uff51uery", "wikipedia\uff3fsearch", "é", "x"]
SOUND = ["(", ")", "=", ",", "5", "'x'", '"y"', "'''z'''", "''", " ", "\n", "\\\n", "#c'\n"]
LAYOUT = ["\t", "\f", "\r\n", "\r", "\\", "\x0b", "\0", "\xa0", "\ufeff"]
STRINGS = ["r'\\d'", "u'v'", "b'w'", "f'{1}'", "Rb'\\q'", "'\\d'", "'\\400'", "'\\N{DIGIT ONE}'"]
OPEN = ["'", '"', "'''", '"""', "f", "r", "'\ud83d'", "'\\ud83d'", "'\\\r\n'", "''''"]
CONSTANTS = ["0b101", "0_5", "05", "5.", ".5", "5e0", "5j", "1e-5", "...", "True", "None", "5if"]
WORDS = ["not ", "if", " else ", "lambda", "await ", "-", "+", "*", "**", "{", "]", ".", ":", "=="]
GROUPS = (NAMES, SOUND, LAYOUT, STRINGS, OPEN, CONSTANTS, WORDS)
PIECES = st.one_of(*map(st.sampled_from, GROUPS))
SKELETON = ["wikipedia_search", "(", "query", "=", "'x'", ",", "top_n", "=", "5", ")"]


@st.composite
def calls(draw: st.DrawFn) -> str:
    """The literal call with a few pieces put in, left out or put in place of others."""
    parts = list(SKELETON)
    if draw(st.booleans()):
        parts = [*parts[:2], *parts[6:9], ",", *parts[2:5], ")"]
    if draw(st.booleans()):
        parts[parts.index("'x'")] = draw(st.one_of(TEXT.map(repr), PIECES))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(parts)))
        parts[place : place + draw(st.integers(0, 2))] = draw(st.lists(PIECES, max_size=2))
    return "".join(parts)


def has_surrogates(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def read_back(value: Any) -> Any:
    """What JSON makes of a value: two surrogates that pair become the character they spell."""
    return json.loads(json.dumps(value))


def literal_by_ast(call: str) -> tuple[str, object] | None:
    """Query and top_n as Python's own parser reads them, without any bound of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(call, mode="eval")
        except (SyntaxError, ValueError):
            return None
    match tree.body:
        case ast.Call(
            func=ast.Name(id="wikipedia_search"),
            args=[],
            keywords=[
                ast.keyword(arg=first, value=ast.Constant(value=one)),
                ast.keyword(arg=second, value=ast.Constant(value=two)),
            ],
        ):
            values: dict[str | None, Any] = {first: one, second: two}
            if values.keys() == {"query", "top_n"} and isinstance(values["query"], str):
                return values["query"], values["top_n"]
    return None


def verdict(parse: Callable[[], T]) -> tuple[str | None, T | None]:
    """The cause of the one named refusal, or the value; anything else raised fails the test."""
    try:
        return None, parse()
    except errors.InvalidRequest as error:
        return error.cause, None


@given(TEXT)
@example("'\"\\")
@example("\ud83d\ude00")
def test_a_rollouts_own_spelling_is_read_as_python_reads_it(query: str) -> None:
    """For every text, the fast reading of its repr() is the text, and is what the parser gives."""
    call = f"wikipedia_search(query={query!r}, top_n=5)"
    assert execute._native_query(call) == query
    assert execute._literal_call(call) == (query, True)


@given(TEXT, st.sampled_from(["'", '"']))
def test_a_fast_reading_is_never_another_than_the_parsers(text: str, quote: str) -> None:
    """Whatever stands between the quotes, escapes whole or broken, the two readings agree."""
    call = f"wikipedia_search(query={quote}{text}{quote}, top_n=5)"
    query = execute._native_query(call)
    if query is not None and not has_surrogates(call):  # such a call is refused before
        assert literal_by_ast(call) == (query, 5)


NOT_PLAIN = re.compile("[\0\r\n\\\\'\ud800-\udfff]")
# The planes with characters, with surrogates, of private use, and unassigned ones.
PLANES = [0, 1, 2, 3, 14, 16]
OTHERS = [plane for plane in range(17) if plane not in PLANES]


@pytest.mark.parametrize(
    "plane", [*PLANES, *(pytest.param(plane, marks=pytest.mark.soak) for plane in OTHERS)]
)
def test_every_character_is_read_alike(plane: int) -> None:
    """Each code point of Unicode, as itself and as repr() spells it, has one reading."""
    width = 4_096
    for start in range(plane << 16, plane + 1 << 16, width):
        characters = "".join(map(chr, range(start, start + width)))
        call = f"wikipedia_search(query={characters!r}, top_n=5)"
        assert execute._native_query(call) == characters
        assert literal_by_ast(call) == (characters, 5)
        plain = NOT_PLAIN.sub("", characters)
        call = f"wikipedia_search(query='{plain}', top_n=5)"
        assert execute._native_query(call) == plain
        assert literal_by_ast(call) == (plain, 5)


@settings(max_examples=3 * EXAMPLES)
@given(st.one_of(calls(), st.lists(PIECES).map("".join)))
@example("wikipedia_search(query=5, top_n=5)")
@example("wikipedia_search(query='x', x=5)")
@example("wikipedia_search(query='x', top_n=5, x=5)")
@example("wikipedia_search(query='x', top_n=True)")
def test_any_call_is_judged_as_python_reads_it(call: str) -> None:
    """The bound refuses nothing the parser would make a literal call of, and adds nothing."""
    oracle = literal_by_ast(call)
    cause, value = verdict(lambda: execute.parse_call(call))
    if oracle is None:
        assert cause == CALL
    else:
        assert value == (oracle[0], type(oracle[1]) is int and oracle[1] == 5)


def reference_reading(env: object, call: object) -> tuple[str | None, str | None]:
    """Latch cause and query by the order the contract states, written out independently."""
    if env != ENV or not isinstance(call, str):
        return CALL, None
    try:
        length = len(call.encode())
    except UnicodeEncodeError:
        return JSON, None
    literal = literal_by_ast(call)
    if length > 8_192 or literal is None or not literal[0].strip():
        return CALL, None
    query, top_n = literal
    try:
        length = len(query.encode())
    except UnicodeEncodeError:
        return JSON, None
    if length > 4_096 or type(top_n) is not int or top_n != 5:
        return CALL, None
    return None, query


@settings(max_examples=3 * EXAMPLES)
@given(
    st.sampled_from([ENV, ENV, ENV, "", None, "\ud800"]),
    st.one_of(
        calls(),
        TEXT,
        st.none(),
        st.integers(4_000, 9_000).map(lambda n: f"wikipedia_search(query={'a' * n!r}, top_n=5)"),
        st.integers(1_300, 2_800).map(lambda n: f"wikipedia_search(top_n=5,query={'東' * n!r})"),
    ),
    st.booleans(),
)
@example(ENV, "\ud800", True)
@example(ENV, r"wikipedia_search(query='\ud800', top_n=5)", True)
@example(ENV, r"wikipedia_search(query='\ud800', top_n=6)", True)
@example(ENV, "wikipedia_search(query='', top_n=6)", True)
@example(ENV, "wikipedia_search(query='x', top_n=6)", True)
@example(ENV, "wikipedia_search(query='<think>', top_n=5)", True)
def test_a_body_has_the_references_verdict(env: str | None, call: Any, ascii_only: bool) -> None:
    """Status of the call, latch cause and query are those of the documented order of tests."""
    text = json.dumps({"env": env, "call": call}, ensure_ascii=ascii_only)
    try:
        body = text.encode()
    except UnicodeEncodeError:
        body = json.dumps({"env": env, "call": call}).encode()
    call = read_back(call)
    cause, query = reference_reading(env, call)
    refused_for, parsed = verdict(lambda: parse_execute(body, RULES))
    if parsed is None:
        assert refused_for == cause
        return
    assert (parsed.env, parsed.call) == (env, call)
    assert (parsed.query + parsed.env + parsed.call).encode()
    if parsed.problem is None or parsed.problem is QueryProblem.protocol_tag:
        assert (cause, query) == (None, parsed.query)
    else:
        refusal = reference_refusal(parsed.problem)
        assert refusal is not None
        assert cause == refusal.cause


# --- strict JSON ---------------------------------------------------------------------------------


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=4)),
    max_leaves=20,
)
MEMBERS = st.lists(st.tuples(LIKELY_TEXT, st.one_of(LIKELY_TEXT, VALUES)), max_size=4)


@st.composite
def documents(draw: st.DrawFn) -> bytes:
    """JSON, or nearly: strings with quotes spelled either way, keys given twice, bytes replaced."""
    ascii_only = draw(st.booleans())
    members = [
        f"{json.dumps(key, ensure_ascii=ascii_only)}: {json.dumps(value, ensure_ascii=ascii_only)}"
        for key, value in draw(MEMBERS)
    ]
    text = "{" + ", ".join(members) + "}" if draw(st.booleans()) else json.dumps(draw(VALUES))
    if draw(st.booleans()):
        text = text.replace('\\"', "\\u0022")
    body = text.encode("utf-8", "surrogatepass")
    if draw(st.booleans()):
        place = draw(st.integers(0, len(body)))
        body = body[:place] + draw(st.binary(max_size=3)) + body[place + draw(st.integers(0, 2)) :]
    return body


class NotStrict(Exception):
    """What the slow, obvious reader raises."""


def obvious_json(body: bytes) -> Any:
    """The same rules by the standard library alone, in the plainest way."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise NotStrict
        return dict(pairs)

    def constant(name: str) -> Any:
        raise NotStrict(name)

    def depth(value: Any) -> int:
        if isinstance(value, dict):
            value = list(value.values())
        return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0

    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except ValueError as error:
        raise NotStrict from error
    if depth(value) > 64:
        raise NotStrict
    return value


def same(one: Any, other: Any) -> bool:
    """Equality that tells 1, 1.0 and True apart, and the order of keys."""
    return type(one) is type(other) and json.dumps(one) == json.dumps(other)


@settings(max_examples=2 * EXAMPLES)
@given(st.one_of(documents(), st.binary(max_size=40)))
@example(b'{"a": "", "a": "\\u0022\\u0022\\u0022\\u0022"}')
@example(b'{"a": "\\\\u0022", "a": "\\u0022"}')
@example(b'{"": "", "": ""}')
def test_strict_json_is_the_standard_librarys_with_our_rules(body: bytes) -> None:
    """Fast and exact reader together take the bytes the plainest one takes, as the same value."""
    refused_for, value = verdict(lambda: strict_json(body))
    try:
        expected = obvious_json(body)
    except NotStrict:
        assert refused_for == JSON
    else:
        assert refused_for is None
        assert same(value, expected)


@given(VALUES, st.integers(0, 80))
def test_depth_is_counted_alike_around_any_value(value: Any, levels: int) -> None:
    """Levels outside and inside add up, and brackets inside strings are not among them."""
    body = b"[" * levels + json.dumps(value).encode() + b"]" * levels
    refused_for, _ = verdict(lambda: strict_json(body))
    try:
        obvious_json(body)
    except NotStrict:
        assert refused_for == JSON
    else:
        assert refused_for is None


# --- every body ----------------------------------------------------------------------------------


@given(st.one_of(st.binary(), documents()))
def test_no_body_escapes_a_verdict(body: bytes) -> None:
    """Any bytes at all give a value or the one named refusal, on every route."""
    shape = {None, JSON, "invalid_reward_request"}
    assert verdict(lambda: parse_execute(body, RULES))[0] in {None, JSON, CALL}
    assert verdict(lambda: parse_reward(body))[0] in shape
    assert verdict(lambda: parse_reward_batch(body, 2))[0] in shape


@given(TEXT, st.one_of(TEXT, st.lists(TEXT, max_size=3)), st.integers(1, 3))
@example("\ud83d", "x", 1)
@example("x", ["y", "\ud83d"], 1)
@example("x", [], 1)
@example("x", "", 1)
def test_a_reward_item_survives_its_body(solution: str, truth: str | list[str], rows: int) -> None:
    """An item whose texts can be written comes back verbatim, and any other is refused."""
    row = read_back({"solution_str": solution, "ground_truth": truth})
    solution, truth = row["solution_str"], row["ground_truth"]
    answers = [truth] if isinstance(truth, str) else truth
    sound = bool(answers) and all(answers)
    for text in (solution, *answers):
        sound = sound and not has_surrogates(text)
    body = json.dumps({"items": [row] * rows}).encode()
    _, items = verdict(lambda: parse_reward_batch(body, 3))
    assert (items is not None) == sound
    held = truth if isinstance(truth, str) else tuple(truth)
    for item in items or ():
        assert (item.solution_str, item.ground_truth) == (solution, held)


@given(st.text())
def test_an_answer_reads_back_as_it_was(result: str) -> None:
    """The standard library reads from an answer exactly the passages put into it."""
    assert json.loads(render_execute(result)) == {"result": result, "output": "", "error": ""}


@given(
    st.text(st.characters(exclude_characters="\"'\\", exclude_categories=("Z", "C")), min_size=1)
)
def test_any_address_has_the_digest_of_its_template(address: str) -> None:
    """Two environments that differ in the search address alone are one environment."""
    text = "def wikipedia_search(query, top_n=5):\n    return ask('{}/search', query, top_n)\n"
    template = environment_digest(text.replace("{}", "<where>"))
    assert environment_digest(text.replace("{}", f"http://{address}")) == template
    assert environment_digest(text.replace("{}", f"ftp://{address}")) != template
