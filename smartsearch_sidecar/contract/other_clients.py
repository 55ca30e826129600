"""Bytes to frozen values, and back, for the clients of other trainers.

Three routes, each in the shapes its clients send and read; ``Form`` says who they are, and what
each makes of an error::

    POST /search        {"query": str,    "top_n": int, "return_score"?: bool}
    POST /batch_search  {"query": [str],  "top_n": int, "return_score"?: bool}
    POST /retrieve      {"queries": [str], "topk"?: int, "return_scores"?: bool}
                        {"query": str,     "topk"?: int, "return_scores"?: bool}
                        {"query": str,     "top_k" and or "k": int}

The number of passages is the run's, not the client's: another one is refused. A query that cannot
be searched is the policy's own doing, also where it is no text at all (a tool call is JSON, and the
policy writes it): it comes back with ``problem`` set, as from ``contract.parse_execute``. So does
another number where the policy's own call is what is sent on (``Form.of_a_call``), if told so.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract.execute import QueryProblem, declined_result, query_problem
from smartsearch_sidecar.contract.json import compact

QUERIES_MAX: Final = 4_096
"""Searches in one request. Search-R1 sends a whole step at once: 512 prompts x 5 rollouts in its
published scripts, 2,560; this is the next power of two."""
BATCH_BYTES_MAX: Final = 16 * 1024 * 1024
"""Bytes of a body that may hold a batch: ``QUERIES_MAX`` queries, each as long as may be."""


class Form(enum.StrEnum):
    """What a client sends and reads, named for the answer."""

    search = enum.auto()
    """``[{"id", "contents"}]``: the unmodified environment, in a sandbox of its own."""
    batch_search = enum.auto()
    """A list of those: FlashRAG's pipelines."""
    nested_many = enum.auto()
    """``{"result": [[{"document", "score"}]]}``: Search-R1, and SkyRL's agent."""
    nested_one = enum.auto()
    """The same with one list: SkyRL's gym."""
    flat_many = enum.auto()
    """``{"result": [[{"id", "contents"}]]}``: slime."""
    flat_one = enum.auto()
    """The same with one list."""
    results = enum.auto()
    """``{"query", "method", "results": [...], "num_results"}``: rLLM."""

    @property
    def route(self) -> str:
        """The segment it is posted to, which is recorded."""
        return self.value if self in (Form.search, Form.batch_search) else "retrieve"

    @property
    def many(self) -> bool:
        return self in (Form.batch_search, Form.nested_many, Form.flat_many)

    @property
    def of_a_call(self) -> bool:
        """Whether the number of passages of one search may be an argument of the policy's own call:
        rLLM, the unmodified environment and that of verifiers send it on. In a batch, and in the
        other forms, the client's configuration says it.
        """
        return self in (Form.search, Form.results, Form.nested_many)

    @property
    def surfaces(self) -> bool:
        """Whether its client makes an empty text of every error status, and raises only on a 200
        without a result (``render_failure``). The others make of an error status an exception or a
        text that says so, and of such a 200 a text that does not.
        """
        return self is Form.flat_many


@dataclass(frozen=True, slots=True)
class Query:
    """One search of a request."""

    text: str
    """Verbatim; empty where it has no UTF-8 form, and JSON where what was sent is no text."""
    problem: QueryProblem | None


@dataclass(frozen=True, slots=True)
class Searches:
    """One request: up to ``QUERIES_MAX`` searches in order, each for ``top_n`` passages."""

    form: Form
    queries: tuple[Query, ...]
    top_n: int
    scores: bool
    """Whether a FlashRAG client asked for them beside the documents."""


# --- reading --------------------------------------------------------------------------------------


def read_form(route: str, value: Any) -> Form:
    """Whose request this is, by its keys. Raises ``InvalidRequest`` for the keys of no client."""
    if type(value) is not dict:
        raise errors.INVALID_SEARCH_REQUEST("The body must be an object.")
    if route in ("search", "batch_search"):
        _require_keys(value, {"query"}, {"top_n", "return_score"})
        return Form.search if route == "search" else Form.batch_search
    if "queries" in value:
        _require_keys(value, {"queries"}, {"topk", "return_scores"})
        return Form.nested_many if _flag(value, "return_scores") else Form.flat_many
    if "top_k" in value or "k" in value:
        _require_keys(value, {"query"}, {"top_k", "k"})
        return Form.results
    _require_keys(value, {"query"}, {"topk", "return_scores"})
    return Form.nested_one if _flag(value, "return_scores") else Form.flat_one


def read_searches(form: Form, value: Any, top_n: int, *, declines_calls: bool = False) -> Searches:
    """The searches of a request; ``top_n`` is the run's. Raises ``InvalidRequest``."""
    asked = value["queries"] if "queries" in value else value["query"]
    if not form.many:
        asked = [asked]
    elif type(asked) is not list:
        raise errors.INVALID_SEARCH_REQUEST("A batch must be a list of queries.")
    if len(asked) > QUERIES_MAX:
        raise errors.INVALID_SEARCH_REQUEST(f"A request holds {QUERIES_MAX} queries at most.")
    queries = tuple(map(_query, asked))
    try:
        _require_top_n(form, value, top_n)
    except errors.InvalidRequest:
        if not (declines_calls and form.of_a_call and len(queries) == 1):
            raise
        queries = (Query(queries[0].text, QueryProblem.invalid_call),)
    return Searches(form, queries, top_n, _flag(value, "return_score"))


def _require_keys(value: dict[str, Any], required: set[str], allowed: set[str]) -> None:
    if not required <= value.keys() <= required | allowed:
        raise errors.INVALID_SEARCH_REQUEST(
            "The body has other keys than any client of this route sends."
        )


def _flag(value: dict[str, Any], name: str) -> bool:
    flag = value.get(name, False)
    if type(flag) is not bool:
        raise errors.INVALID_SEARCH_REQUEST(f"{name} must be true or false.")
    return flag


def _require_top_n(form: Form, value: dict[str, Any], top_n: int) -> None:
    if form.route != "retrieve":
        name, wanted, key = "top_n", value.get("top_n"), "five, as in the dataset's environment"
    elif form is Form.results:
        name = "k" if value.get("k") is not None else "top_k"  # the order of rLLM's own server
        wanted, key = value.get(name), "execute.retrieve_topk"
    else:
        # Absent means the server's own number in all servers of this shape.
        name, wanted, key = "topk", value.get("topk"), "execute.retrieve_topk"
        wanted = top_n if wanted is None else wanted
    if type(wanted) is not int or wanted != top_n:
        raise errors.INVALID_SEARCH_REQUEST(
            f"{name} must be {top_n} ({key}): make client and configuration agree."
        )


def _query(value: Any) -> Query:
    if type(value) is not str:
        return Query(json.dumps(value), QueryProblem.not_text)
    problem = query_problem(value)
    return Query("" if problem is QueryProblem.not_encodable else value, problem)


# --- answering ------------------------------------------------------------------------------------

Documents = Sequence[Mapping[str, Any]]
"""What one search found: ``id``, ``contents`` and ``score`` of each, best first."""


def render_found(form: Form, documents: Documents) -> bytes:
    """One search's part of an answer.

    The score of a provider without scores is ``None``; rLLM's client puts its own 0.0 there.
    """
    if form in (Form.nested_many, Form.nested_one):
        return compact([{"document": _plain(one), "score": one["score"]} for one in documents])
    if form is Form.results:
        return compact([_result(rank, one) for rank, one in enumerate(documents, 1)])
    return compact([_plain(one) for one in documents])


def render_scores(documents: Documents) -> bytes:
    """The scores beside the documents of one search, for FlashRAG's ``return_score``."""
    return compact([one["score"] for one in documents])


def render_declined(form: Form, problem: QueryProblem) -> bytes:
    """A declined query's part of an answer, as each client's own environment would put it.

    The unmodified environment answers ``invalid query`` to an empty one, and joins the contents of
    what it is given: one document that says so comes out the same. The others have words of their
    own for nothing having been found.
    """
    if form in (Form.search, Form.batch_search):
        told = declined_result(problem)
        return compact([{"id": told.replace(" ", "-"), "contents": told}])
    return b"[]"


DECLINED_SCORES: Final = b"[0.0]"
"""The score beside the one document of a declined query."""


def render_answer(asked: Searches, found: Sequence[bytes], scores: Sequence[bytes]) -> bytes:
    """The body of a 200 answer from the parts of its searches, in their order."""
    form = asked.form
    if form is Form.results:
        (query,), (results,) = asked.queries, found
        told = compact(query.text), results, len(orjson.loads(results))
        return b'{"query":%b,"method":"smartsearch-sidecar","results":%b,"num_results":%d}' % told
    lists = b"[" + b",".join(found) + b"]"
    if form.route == "retrieve":
        return b'{"result":' + lists + b"}"
    if not asked.scores:
        return lists if form.many else found[0]
    beside = b"[" + b",".join(scores) + b"]"
    return b"[%b,%b]" % ((lists, beside) if form.many else (found[0], scores[0]))


def render_failure(error_payload: bytes) -> bytes:
    """A failure for a client that ``surfaces`` only a 200 without a result: it indexes ``null``."""
    return b'{"result":null,' + error_payload.removeprefix(b"{")


def _plain(document: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": document["id"], "contents": document["contents"]}


def _result(rank: int, document: Mapping[str, Any]) -> dict[str, Any]:
    score = {} if document["score"] is None else {"score": document["score"]}
    return {"id": f"doc_{rank}", "content": _plain(document), **score}
