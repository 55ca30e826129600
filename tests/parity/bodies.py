"""Bodies of ``/execute`` as bytes, from what the pinned rollout sends to noise."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from tests.fakes.served import ENVIRONMENT
from tests.property.test_contract_properties import TEXT, calls

TAGS = ["<search>", "</think>", "<RESULT>", "</Answer>", "< think>", "<searching>", "<|im_end|>"]
WORDS = ["Ada Lovelace", "東京", "e\u0301", "a\u00a0b", "\ud800", "\x00", "'\"", "\\", "x" * 4090]

QUERIES = {
    "empty": "",
    "a space": " ",
    "blank": "\t\n\u2003\x1f\x85",
    "zero width": "\u200b",
    "4,096 bytes": "x" * 4096,
    "4,097 bytes": "x" * 4097,
    "4,096 bytes padded": " " + "x" * 4095,
    "4,095 bytes of CJK": "東" * 1365,
    "4,098 bytes of CJK": "東" * 1366,
    "8,192 bytes of call": "x" * (8192 - len("wikipedia_search(query='', top_n=5)")),
    "8,193 bytes of call": "x" * (8193 - len("wikipedia_search(query='', top_n=5)")),
    "a lone surrogate": "\ud800",
    "surrogates that pair": "\ud83d\ude00",
    **{f"a tag {tag}": f"x {tag} y" for tag in TAGS},
}
queries = st.one_of(
    TEXT,
    st.lists(st.sampled_from([*TAGS, *WORDS, " ", "\n", "\u3000"]), max_size=3).map("".join),
    st.integers(4094, 4098).map(lambda size: "x" * size),
    st.integers(1363, 1367).map(lambda size: "東" * size),
    st.sampled_from(sorted(QUERIES)).map(QUERIES.__getitem__),
)
spellings = st.sampled_from(
    [
        "wikipedia_search(query={}, top_n=5)",
        "wikipedia_search(top_n=5, query={})",
        "wikipedia_search(query={}, top_n=5,)",
        "wikipedia_search( query = {} , top_n = 0x5 ) # asked",
        "(wikipedia_search)(query=({}), top_n=(5))",
        "wikipedia_search(query=u{}, top_n=5)",
        "wikipedia_search(query='' {} '', top_n=0_5)",
        "wikipedia_search(query={}, top_n=5.0)",
        "wikipedia_search(query={}, top_n=True)",
        "wikipedia_search(query={}, top_n='5')",
        "wikipedia_search(query={}, top_n=-5)",
        "wikipedia_search(query={}, top_n=6)",
        "wikipedia_search(query={})",
        "wikipedia_search({}, top_n=5)",
        "wikipedia_search({}, 5)",
        "wikipedia_search(query={}, top_n=5, k=1)",
        "wikipedia_search(**{{'query': {}, 'top_n': 5}})",
        "wikipedia_search(query={}.strip(), top_n=5)",
        "wikipedia_search(query=f{}, top_n=5)",
        "wikipedia_search(query=b{}, top_n=5)",
        "wiki.wikipedia_search(query={}, top_n=5)",
        "print(wikipedia_search(query={}, top_n=5))",
        "wikipedia_search(query={}, top_n=5)[0]",
        "x = wikipedia_search(query={}, top_n=5)",
        " wikipedia_search(query={}, top_n=5)",
        "wikipedia_search(query={}, top_n=5)\n",
        "wikipedia_search(query=\n{},\ntop_n=5)\n\n",
        "wikipedia_search(query={}, top_n=5); 1",
    ]
)
DEEP_CALL = f"wikipedia_search(query={'(' * 65}'x'{')' * 65}, top_n=5)"
nested = st.builds(
    lambda depth, marks: (
        f"wikipedia_search(query={marks[0] * depth}'x'{marks[1] * depth}, top_n=5)"
    ),
    st.sampled_from([1, 5, 63, 64, 65, 66, 90, 150, 198, 199, 200, 300, 1500]),
    st.sampled_from(["()", "[]", "- "]),
)
call_texts = st.one_of(
    queries.map(lambda query: f"wikipedia_search(query={query!r}, top_n=5)"),
    st.builds(lambda form, query: form.format(repr(query)), spellings, queries),
    calls(),
    nested,
    st.sampled_from(["", "wikipedia_search", "\0", "import os", "'" * 8200]),
)

numbers = st.sampled_from([0, -1, 5, 1.5, 1e308, 10**30])
others = st.one_of(st.none(), st.booleans(), numbers, TEXT, st.just([]), st.just({}))
environments = st.one_of(
    st.just(ENVIRONMENT),
    st.sampled_from(
        [ENVIRONMENT + " ", ENVIRONMENT.upper(), "", "import requests", "\ud800", ENVIRONMENT[:-1]]
    ),
    others,
)
deep = st.builds(
    lambda depth, pair: json.loads(pair[0] * depth + "0" + pair[1] * depth),
    st.sampled_from([1, 60, 62, 63, 64, 65, 200]),
    st.sampled_from([("[", "]"), ('{"a":', "}")]),
)


@st.composite
def values(draw: st.DrawFn) -> Any:
    """A JSON value, most often the object the rollout sends."""
    value: dict[str, Any] = {"env": ENVIRONMENT, "call": draw(call_texts)}
    match draw(st.integers(0, 9)):
        case 0:
            value["env"] = draw(environments)
        case 1:
            value["call"] = draw(others)
        case 2:
            del value[draw(st.sampled_from(["env", "call"]))]
        case 3:
            value[draw(st.sampled_from(["", "Env", "call ", "\ud800"]))] = draw(others | deep)
        case 4:
            return draw(st.one_of(others, deep, st.just([value])))
    if draw(st.booleans()):
        value = dict(reversed(value.items()))
    return value


ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1"]
EDITS = [
    ('"call"', '"env"'),
    ('"env"', '"call"'),
    ('"env"', '"\\u0065nv"'),
    ('"call": "', '"call": "x", "call": "'),
    ("{", '{"call": "x", '),
    ("{", '{"a": {"b": 1, "b": 2}, '),
    ("{", '{"a": [NaN], '),
    ("{", '{"a": -Infinity, '),
    ("{", '{"a": 1e999, '),
    ("{", "{,"),
    ("{", "{'a': 1, "),
    ("{", "{/* */"),
    ("{", "{" + '"a": ' + "9" * 4300 + ", "),
    ("{", "{" + '"a": -' + "9" * 4301 + ", "),
    ("}", ",}"),
    ("}", "}}"),
    ("}", ""),
    ("wikipedia", "wiki\tpedia"),
    ("wikipedia", "wiki\\pedia"),
    ("wikipedia", "wiki\\u00"),
    ("wikipedia", "\\u0077ikipedia"),
    ("wikipedia", "\\ud800wikipedia"),
    ("(", "\\u0028"),
    (":", ""),
    (", ", ",\r\n\t "),
]


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """What is posted: mostly one JSON value in UTF-8."""
    text = json.dumps(
        draw(values()),
        ensure_ascii=draw(st.booleans()),
        separators=draw(st.sampled_from([None, (",", ":"), (" ,\n", "\t: ")])),
    )
    if draw(st.integers(0, 3)) == 0:
        old, new = draw(st.sampled_from(EDITS))
        text = text.replace(old, new, 1)
    if draw(st.integers(0, 9)) == 0:
        text = draw(st.sampled_from(["", " ", "\n", "\x0b", "\0", "x"])) + text
        text += draw(st.sampled_from(["", " \r\n", "\0", "{}", ",", "\ufeff"]))
    encoding = draw(st.sampled_from(ENCODINGS)) if draw(st.integers(0, 11)) == 0 else "utf-8"
    body = text.encode(encoding, "replace" if encoding == "latin-1" else "surrogatepass")
    if draw(st.integers(0, 11)) == 0:
        place = draw(st.integers(0, len(body)))
        body = body[:place] + draw(st.binary(max_size=2)) + body[place + 1 :]
    return body or b" "
