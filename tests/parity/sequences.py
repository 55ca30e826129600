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

TARGETS = (
    TARGET,
    TARGET + "?",
    TARGET + "?q=/x",
    TARGET + "#x",
    f"/{CAPABILITY}/",
    f"/{CAPABILITY}",
    f"/{CAPABILITY}?x/execute",
    f"/{CAPABILITY}#/execute",
    f"//{CAPABILITY}/execute",
    f"///{CAPABILITY}/execute",
    f"//{CAPABILITY}/other",
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
)
METHODS = ("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "PROPFIND")
MEDIA_TYPES = (
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
)
FURTHER = (
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
)
SIZES = (16_383, 16_384, 16_385, 70_000)
EMPTY_LENGTHS = ("0", "000", None)
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


EDGE_BODY = json.dumps(native_body("edge")).encode()


def edge(body: bytes = EDGE_BODY, **words: Any) -> Step:
    """A good body behind a message of another kind."""
    return Step(message(body, **words), body=body)


EDGES: dict[str, Step] = {
    **{f"target {target}": edge(target=target) for target in TARGETS},
    **{f"method {method}": edge(method=method) for method in METHODS},
    **{f"type {' '.join(lines)}": edge(headers=lines) for lines in MEDIA_TYPES},
    **{f"header {line}": edge(headers=(JSON_TYPE, line)) for line in FURTHER},
    **{f"size {size}": edge(EDGE_BODY.ljust(size)) for size in SIZES},
    **{f"length {length} and no body": edge(b"", length=length) for length in EMPTY_LENGTHS},
    "a length with zeros before": edge(length=f"000{len(EDGE_BODY)}"),
    "HTTP/1.0": edge(version="HTTP/1.0"),
    "chunked": Step(CHUNKED),
}


@st.composite
def at_the_edge(draw: st.DrawFn) -> Step:
    """Several slips in one message."""
    lines = draw(st.lists(st.sampled_from(FURTHER), max_size=3, unique=True))
    types = draw(st.just((JSON_TYPE,)) | st.sampled_from(MEDIA_TYPES))
    size = draw(st.just(len(EDGE_BODY)) | st.sampled_from(SIZES))
    return edge(
        EDGE_BODY.ljust(size),
        method=draw(st.just("POST") | st.just("POST") | st.sampled_from(METHODS)),
        target=draw(st.just(TARGET) | st.sampled_from(TARGETS)),
        headers=(*types, *lines),
    )


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
    st.sampled_from(sorted(EDGES)).map(EDGES.__getitem__),
    odd,
)
sequences = st.builds(
    Sequence,
    st.lists(steps, min_size=1, max_size=7).map(tuple),
    st.sampled_from([LIMIT, LIMIT, 1, 2, 3]),
)
