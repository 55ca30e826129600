"""The text of a call, spelling by spelling; generated ones are in property/."""

from __future__ import annotations

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract import execute
from smartsearch_sidecar.contract.execute import parse_call
from tests.fakes.each import each

LONE = "\ud83d"


def refusal(call: str) -> errors.InvalidRequest:
    with pytest.raises(errors.InvalidRequest) as caught:
        parse_call(call)
    return caught.value


ACCEPTED = [
    ("wikipedia_search(query='x', top_n=5)", "x"),
    ('wikipedia_search(query="x", top_n=5)', "x"),
    ("wikipedia_search(top_n=5, query='x')", "x"),
    ("wikipedia_search (\tquery = 'x',\ftop_n=5,)", "x"),
    ("(wikipedia_search)(query=('x'), top_n=(5))", "x"),
    ("((wikipedia_search(query='x', top_n=5)))", "x"),
    ("wikipedia_search(query='a' \"b\"\n'''c'''r'\\d'u'e', top_n=5)", "abc\\de"),
    ("wikipedia_search(query='a''b', top_n=5)", "ab"),
    ('wikipedia_search(query="""a"b\n""", top_n=5)', 'a"b\n'),
    ("wikipedia_search(query='''a\r\nb\rc''', top_n=5)", "a\nb\nc"),
    ("wikipedia_search(query='a\\\r\nb', top_n=5)", "ab"),
    ("wikipedia_search(query=R'\\n\\'', top_n=5)", "\\n\\'"),
    ("wikipedia_search(query='\\d\\400\\8', top_n=5)", "\\d\u0100\\8"),
    ("wikipedia_search(query='\\N{BULLET}\\x41\\101\\u00e9\\U0001F3BB\\v', top_n=5)", "•AAé🎻\v"),
    ("wikipedia_search(query='\\U0001f3bb\\\\\\'\\\"\\t', top_n=5)", "🎻\\'\"\t"),
    (
        "wikipedia_search(query='\x0c\x1a\x7f\x85\u2028\ufeff', top_n=5)",
        "\x0c\x1a\x7f\x85\u2028\ufeff",
    ),
    ("wikipedia_search(query='x', top_n=0b101)", "x"),
    ("wikipedia_search(query='x', top_n=0X0_5)", "x"),
    ("wikipedia_search(query='x', top_n=0o5)", "x"),
    ("\n# note 'x\n\nwikipedia_search(query='x', # \"\n top_n=5) # )))\n", "x"),
    ("wikipedia_search(\\\nquery='x', top_n=5)", "x"),
    ("\uff57ikipedia\uff3fsearch(\uff51uery='x', \U0001d4fdop_n=5)", "x"),
    ("wikipedi\xaa_search(query='x', t\xbap_n=5)", "x"),
    ("wikipedia_search(query='# no comment', top_n=5)", "# no comment"),
    ("wikipedia_search(query=" + "(" * 64 + "'x'" + ")" * 64 + ", top_n=5)", "x"),
    ("wikipedia_search(query=" + "'a' " * 1_000 + ", top_n=5)", "a" * 1_000),
    ("wikipedia_search(query='" + "(" * 900 + "', top_n=5)", "(" * 900),
    ("wikipedia_search(query='  x ', top_n=5)", "  x "),
]


@each(("call", "query"), ACCEPTED)
def test_one_literal_call_is_read_in_any_spelling(call: str, query: str) -> None:
    """Whatever Python reads as the one literal call is accepted, without a warning, verbatim."""
    assert parse_call(call) == (query, True)


REFUSED = [
    "",
    "wikipedia_search",
    "wikipedia_search()",
    "wikipedia_search(query='x')",
    "wikipedia_search(top_n=5)",
    "wikipedia_search('x', 5)",
    "wikipedia_search('x', query='x', top_n=5)",
    "wikipedia_search('x', top_n=5)",
    "wikipedia_search(query='x', query='x')",
    "wikipedia_search(query='x', top_n=5, top_n=5)",
    "wikipedia_search(query='x', top_n=5, extra=1)",
    "wikipedia_search(query='x', top_k=5)",
    "wikipedia_search(**{'query': 'x', 'top_n': 5})",
    "wikipedia_search(*['x'], top_n=5)",
    "wikipedia_search(query='x', top_n=+5)",
    "wikipedia_search(query='x', top_n=05)",
    "wikipedia_search(query='x', top_n=5_)",
    "wikipedia_search(query='x', top_n=5if 1else 5)",
    "wikipedia_search(query='x', top_n=" + "9" * 5_000 + ")",
    "wikipedia_search(query=b'x', top_n=5)",
    "wikipedia_search(query=f'x', top_n=5)",
    "wikipedia_search(query='a' f'x', top_n=5)",
    "wikipedia_search(query=t'x', top_n=5)",
    "wikipedia_search(query=ur'x', top_n=5)",
    "wikipedia_search(query='a' b'x', top_n=5)",
    "wikipedia_search(query=None, top_n=5)",
    "wikipedia_search(query=..., top_n=5)",
    "wikipedia_search(query=1, top_n=5)",
    "wikipedia_search(query=x, top_n=5)",
    "wikipedia_search(query=['x'], top_n=5)",
    "wikipedia_search(query='a'+'b', top_n=5)",
    "wikipedia_search(query='a'.strip(), top_n=5)",
    "wikipedia_search(query=(q:='x'), top_n=5)",
    "wikipedia_search(query='x', top_n=5)(1)",
    "wikipedia_search(query='x', top_n=5).x",
    "wikipedia_search(query='x', top_n=5); import os",
    "wikipedia_search(query='x', top_n=5)\nimport os",
    "wikipedia_search(query='x', top_n=5),",
    "[wikipedia_search(query='x', top_n=5)]",
    "wikipedia_search(query='x', top_n=5) or 1",
    "await wikipedia_search(query='x', top_n=5)",
    "lambda: wikipedia_search(query='x', top_n=5)",
    "x.wikipedia_search(query='x', top_n=5)",
    "web_search(query='x', top_n=5)",
    "wikipedia_search(query='x, top_n=5)",
    "wikipedia_search(query='x'', top_n=5)",
    "wikipedia_search(query='a\nb', top_n=5)",
    "wikipedia_search(query='a\rb', top_n=5)",
    "wikipedia_search(query='a\x00b', top_n=5)",
    "wikipedia_search(query='\\x4', top_n=5)",
    "wikipedia_search(query='\\u123', top_n=5)",
    "wikipedia_search(query='\\U00110000', top_n=5)",
    "wikipedia_search(query='\\N{NO SUCH NAME}', top_n=5)",
    "wikipedia_search(query='\\', top_n=5)",
    "wikipedia_search(query='x' top_n=5)",
    "wikipedia_search(query=='x', top_n=5)",
    " wikipedia_search(query='x', top_n=5)",
    "wikipedia_search(query='x',\u00a0top_n=5)",
    "wikipedia_search(query='x',\x0btop_n=5)",
    "wikipedia_search(query='x', top_n=5)\\",
    "\ufeffwikipedia_search(query='x', top_n=5)",
    "__import__('os').system('true')",
    "wikipedia_search(query=" + "(" * 65 + "'x'" + ")" * 65 + ", top_n=5)",
]


@each("call", REFUSED)
def test_anything_else_is_refused(call: str) -> None:
    """A call that is not the one literal call is refused as invalid, also with a sound query."""
    assert refusal(call).cause == "invalid_native_request"


@each(
    "call",
    [
        "(" * 260_000,
        "(" * 4_000 + "1" + ")" * 4_000,
        "-" * 260_000 + "1",
        "not " * 60_000 + "1",
        "1" + "+1" * 100_000,
        "a" + ".a" * 100_000,
        "5." + ".real" * 50_000,
        "0xe" + "-0xe" * 50_000,
        "f" + "()" * 100_000,
        "f'{" * 50_000,
        "5if''else " * 20_000,
        "lambda:" * 30_000 + "1",
        "'" + "\\'" * 130_000,
        "'''" + '"' * 250_000,
        "\\" * 250_000,
        "rb" * 130_000,
        "wikipedia_search(" + "5," * 120_000 + ")",
        "wikipedia_search(query=f'{" + "(" * 100_000 + "', top_n=5)",
        "\\\n" * 120_000 + "1",
    ],
)
def test_hostile_calls_of_the_largest_size_are_refused(call: str) -> None:
    """No text the edge lets through can exhaust a parser's stack, or time."""
    assert refusal(call).cause == "invalid_native_request"


@each(
    "query",
    ["", "x", "it's", "'\"", "a\n\\boxed{1}\t\r\x07", "\u200b\xa0🎻\U000e0001\U0010ffff", LONE],
)
def test_the_native_spelling_never_reaches_the_parser(query: str) -> None:
    """A rollout's own calls are read without ast, hence without its process-wide side effects."""
    assert execute._native_query(f"wikipedia_search(query={query!r}, top_n=5)") == query


@each("number", ["6", "5.0", "5j", "True", "None", "'5'", "b'5'", "...", "1e-5"])
def test_another_top_n_is_told_apart(number: str) -> None:
    """A call that is wrong in the constant of its top_n alone still yields its query."""
    assert parse_call(f"wikipedia_search(query={LONE!r}, top_n={number})") == (LONE, False)


def test_words_are_counted_outside_strings_and_comments() -> None:
    """Sixty-four pairs of parentheses may be spare; text and layout are free."""
    call = "(" * 64 + "wikipedia_search(query='x', top_n=5,)" + ")" * 64
    assert parse_call(call + " # a b c (((") == ("x", True)
    assert refusal(f"({call})").message == refusal("").message


@each(
    "text",
    ["f'{x}'", "F''", "rf''", 'fR""', "t''", "tr''", "xr''", "5''", "5.real", "'''a'", '"""a"'],
)
def test_what_could_nest_unseen_never_reaches_the_parser(text: str) -> None:
    """A literal that embeds expressions, or whose end is in doubt, is refused before parsing."""
    assert not execute._bounded(text)


def test_each_condition_has_one_constant_message() -> None:
    """What a message says never depends on the values of a request, so it can never leak one."""
    messages = {refusal(call).message for call in REFUSED}
    assert len(messages) == 2
    assert all(message.endswith(".") for message in messages)
