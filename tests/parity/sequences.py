"""Sequences of requests, from a rollout's day to a hostile one."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from tests.fakes.served import native_body
from tests.parity.bodies import bodies, queries
from tests.parity.messages import ODD
from tests.parity.play import Sequence, Step
from tests.parity.retriever import FINGERPRINTS, SEARCHES, Plan
from tests.parity.sides import LIMIT
from tests.parity.wire import CAPABILITY, JSON_TYPE, TARGET, message

good_queries = st.sampled_from(["Ada Lovelace", "a", "東京", " padded ", "x" * 4096, "<b>", "'\""])
good_plans = st.just(Plan())

texts = st.one_of(
    st.text(st.characters(), max_size=20),
    st.sampled_from(["", " ", "\n x \n", "<result>", "</Think>", "<a>", "\ud800", "a\n\nb"]),
)
scores = st.one_of(
    st.none(), st.floats(), st.integers(-(2**63), 2**63), st.sampled_from([True, "1", [1]])
)
documents = st.lists(
    st.fixed_dictionaries(
        {"id": st.sampled_from(["1", " 1", "2", "3", "4", ""]) | texts, "contents": texts},
        optional={"score": scores, "title": texts},
    ),
    max_size=6,
).map(tuple)
plans = st.one_of(
    st.sampled_from(sorted(SEARCHES)).map(lambda name: Plan(search=name)),
    documents.map(lambda found: Plan(search=found)),
    st.sampled_from(sorted(FINGERPRINTS)).map(lambda name: Plan(before=name)),
    st.sampled_from(sorted(FINGERPRINTS)).map(lambda name: Plan(after=name)),
)

targets = st.sampled_from(
    [
        TARGET,
        TARGET + "/",
        TARGET + "?",
        TARGET + "?q=/x",
        TARGET + "#x",
        f"/{CAPABILITY}/",
        f"/{CAPABILITY}",
        f"/{CAPABILITY}?x/execute",
        f"/{CAPABILITY}#/execute",
        f"/{CAPABILITY}//execute",
        f"/{CAPABILITY}/EXECUTE",
        f"/{CAPABILITY}/execut%65",
        f"/{CAPABILITY}/health",
        f"/{CAPABILITY[:-1]}/execute",
        f"/{CAPABILITY}x/execute",
        f"/{CAPABILITY.upper()}/execute",
        f"/%65{CAPABILITY[1:]}/execute",
        f"http://127.0.0.1/{CAPABILITY}/execute",
        f"//x/{CAPABILITY}/execute",
        "/",
        "/execute",
        "//execute",
        "/../execute",
        f"/x/../{CAPABILITY}/execute",
    ]
)
methods = st.sampled_from(["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "PROPFIND"])
media_types = st.sampled_from(
    [
        (),
        ("Content-Type: application/json; charset=utf-8",),
        ("Content-Type:application/JSON",),
        ("Content-Type: application/json;",),
        ("Content-Type: application/json, text/plain",),
        ("Content-Type: text/json",),
        ("Content-Type: application/json/x",),
        ("Content-Type: json",),
        ("Content-Type: ",),
        ("Content-Type: application/x-www-form-urlencoded",),
    ]
)
further = st.sampled_from(
    [
        "Connection: close",
        "Connection: keep-alive",
        "Content-Encoding: gzip",
        "Expect: 100-continue",
        "Accept-Encoding: gzip, deflate",
        "User-Agent: python-requests/2.32.4",
        "Upgrade: h2c",
        "Authorization: Bearer x",
        "X-Forwarded-For: 10.0.0.1",
        "Cookie: a=\xe9",
    ]
)
CHUNKED = message(
    b"2\r\n{}\r\n0\r\n\r\n", headers=(JSON_TYPE, "Transfer-Encoding: chunked"), length=None
)


@st.composite
def asked(draw: st.DrawFn, plan: st.SearchStrategy[Plan] = good_plans) -> Step:
    """A good query, with a plan for the retriever."""
    body = json.dumps(native_body(draw(good_queries))).encode()
    return Step(message(body), draw(plan), body)


@st.composite
def queried(draw: st.DrawFn) -> Step:
    """A query of any kind, in the rollout's own spelling."""
    body = json.dumps(native_body(draw(queries))).encode()
    return Step(message(body), body=body)


@st.composite
def posted(draw: st.DrawFn) -> Step:
    """A body of any kind."""
    body = draw(bodies())
    return Step(message(body), body=body)


@st.composite
def at_the_edge(draw: st.DrawFn) -> Step:
    """A good body behind a target, method or headers of another kind."""
    body = json.dumps(native_body("edge")).encode()
    words: dict[str, Any] = {
        "headers": (JSON_TYPE, *draw(st.lists(further, max_size=3, unique=True)))
    }
    match draw(st.integers(0, 6)):
        case 0:
            words["target"] = draw(targets)
        case 1:
            words["method"] = draw(methods)
            words["target"] = draw(targets)
        case 2:
            words["headers"] = draw(media_types)
        case 3:
            body += b" " * (draw(st.sampled_from([16_383, 16_384, 16_385, 70_000])) - len(body))
        case 4:
            body, words["length"] = b"", draw(st.sampled_from(["0", "000", None]))
        case 5:
            words["length"] = f"000{len(body)}"
        case 6:
            words["version"] = "HTTP/1.0"
    return Step(message(body, **words), body=body)


odd = st.sampled_from(sorted(ODD)).map(lambda name: Step(ODD[name].request, odd=name))
steps = st.one_of(
    asked(),
    asked(),
    asked(plans),
    asked(plans),
    queried(),
    posted(),
    posted(),
    at_the_edge(),
    at_the_edge(),
    odd,
    st.just(Step(CHUNKED)),
)
sequences = st.builds(
    Sequence,
    st.lists(steps, min_size=1, max_size=7).map(tuple),
    st.sampled_from([LIMIT, LIMIT, 1, 2, 3]),
)
