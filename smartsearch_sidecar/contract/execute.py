"""Bytes to frozen values for ``POST /execute``, and back.

Two kinds of fault are kept apart. A request that only a wrong program sends is refused here, with
``InvalidRequest``. A well-formed call whose only fault is its query is the policy's own doing: it
comes back with ``problem`` set, and the profile (which this module does not know) decides. Where
the policy writes the whole call, as ReCall's does, any other call is its doing as well
(``declines_calls``).

The call is a literal ``wikipedia_search(query=<str>, top_n=5)``, never run. What the rollout writes
(a ``repr()`` of the policy's text) is read by one regular expression; any other spelling Python
itself would take is read by ``ast``, after a bound on its size that is ours, so the verdict is the
same on every interpreter.
"""

from __future__ import annotations

import ast
import enum
import functools
import hashlib
import re
import warnings
from dataclasses import dataclass
from typing import Final, NamedTuple

from smartsearch_sidecar import errors
from smartsearch_sidecar.contract.json import compact, strict_json
from smartsearch_sidecar.run.json_values import has_utf8_form

TOP_N: Final = 5
"""Passages of one search: the number in every call of the dataset's environment."""
CALL_WORDS_MAX: Final = 138
"""Names, numbers and marks in a call outside strings: ten, and 64 pairs of parentheses more."""
CALL_BYTES_MAX: Final = 8_192
"""Bytes of UTF-8 in ``call``; longer ones count as a bad query when they are otherwise sound."""
QUERY_BYTES_MAX: Final = 4_096
"""Bytes of UTF-8 in ``query``."""
DECLINED_RESULT: Final = "invalid query"
"""What a declined query is answered with: the text the unmodified environment gives."""
DECLINED_CALL_RESULT: Final = "invalid call"
"""What a declined call is answered with."""


class QueryProblem(enum.StrEnum):
    """Why what the policy wrote cannot be searched: the first of these that holds."""

    call_too_long = enum.auto()
    empty = enum.auto()
    not_encodable = enum.auto()
    too_long = enum.auto()
    protocol_tag = enum.auto()
    not_text = enum.auto()
    """Another JSON value in a query's place; only the routes of other trainers can hold one."""
    invalid_call = enum.auto()
    """No call of the one tool with its two arguments; a problem only where calls are declined."""


@dataclass(frozen=True, slots=True)
class ExecuteRules:
    """Which environments a run accepts: one by name, others by ``environment_digest`` (64 hex).
    ``declines_calls`` makes a problem of a call that is refused otherwise.
    """

    environment: str
    accepted_environment_sha256: frozenset[str]
    declines_calls: bool = False


class ExecuteCall(NamedTuple):
    """What was asked. Every text in it has a UTF-8 form, so every one can be recorded."""

    env: str
    call: str
    """Verbatim; of an invalid one what has no UTF-8 form is spelled out."""
    query: str
    """Not stripped; empty where it has no UTF-8 form, and of an invalid call."""
    problem: QueryProblem | None


# --- the environment ------------------------------------------------------------------------------

_SEARCH_URL: Final = re.compile(r"""(["'])(?:https?://[^\s"'\\]+|<[\w-]+>)/search\1""")


def environment_digest(env: str) -> str:
    """The sha256 (64 hex) of an environment's text with its search URL masked out.

    In every string literal that is exactly a URL and then ``/search``, the URL becomes ``*``. A
    template's placeholder in angle brackets (``<word-word>``) counts as a URL, so a dataset and
    what the trainer makes of it have one digest. Quotes stay; the text is hashed as UTF-8, and
    ``UnicodeEncodeError`` raised where it has no such form.
    """
    return hashlib.sha256(_SEARCH_URL.sub(r"\1*/search\1", env).encode()).hexdigest()


@functools.lru_cache(maxsize=32)
def _require_accepted(env: str, accepted: frozenset[str]) -> None:
    # Every call of a rollout carries the same text. Only texts that were accepted stay in the
    # cache: a refusal is an exception, which is not kept.
    try:
        known = environment_digest(env) in accepted
    except UnicodeEncodeError:
        known = False
    if not known:
        raise errors.INVALID_NATIVE_REQUEST("The environment is not one this run accepts.")


# --- the text of the call -------------------------------------------------------------------------

# What repr() writes for a string, between quotes. No name, comment or white space is in question
# here, so the text means the same to this expression as to Python's own reader.
_ESCAPE: Final = r"\\(?:[\\'\"nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U00(?:0[0-9a-f]|10)[0-9a-f]{4})"
_NATIVE: Final = re.compile(
    rf"""wikipedia_search\(query=(?:'((?:[^'\\\r\n\0]++|{_ESCAPE})*+)'"""
    rf"""|"((?:[^"\\\r\n\0]++|{_ESCAPE})*+)"), top_n={TOP_N}\)"""
)
_ESCAPES: Final = re.compile(_ESCAPE)
_SIMPLE_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t"}

# Python's tokens as far as an acceptable call has them. A string prefix that embeds expressions has
# no token here, nor has an operator: nothing that passes can nest except by counted words.
_LAYOUT: Final = r"[ \t\f\r\n]|\\(?:\r\n|[\r\n])|\#[^\r\n]*+"
_PIECE: Final = r"\\(?:\r\n|.)"
_STRING: Final = (
    r"(?:[rR][bB]?|[bB][rR]?|[uU])?(?:"
    rf"'''(?:[^'\\]++|{_PIECE}|'(?!''))*+'''|'(?!'')(?:[^'\\\r\n]++|{_PIECE})*+'|"
    rf'"""(?:[^"\\]++|{_PIECE}|"(?!""))*+"""|"(?!"")(?:[^"\\\r\n]++|{_PIECE})*+")'
)
_NUMBER: Final = (
    r"(?:0[xXoObB][0-9A-Fa-f_]++|(?:[0-9][0-9_]*+(?:\.[0-9_]*+)?|\.[0-9][0-9_]*+)"
    r"(?:[eE][+-]?[0-9_]++)?[jJ]?)(?![0-9A-Za-z_.'\"])"
)
_NAME: Final = r"[A-Za-z_\x80-\U0010ffff][0-9A-Za-z_\x80-\U0010ffff]*+(?!['\"])"
_TOKEN: Final = re.compile(
    rf"(?:{_LAYOUT}|{_STRING})++|(?P<word>{_NUMBER}|{_NAME}|[(),=]|\.\.\.)", re.DOTALL
)


def parse_call(call: str) -> tuple[str, bool]:
    """The query of ``call``, verbatim, and whether its ``top_n`` is ``TOP_N``.

    ``call`` is text with a UTF-8 form. The query may be any text, lone surrogates included.

    Raises: ``InvalidRequest`` with cause ``invalid_native_request`` where the call is not one
    literal call of ``wikipedia_search`` with a string ``query`` and a constant ``top_n``.
    """
    query = _native_query(call)
    return _literal_call(call) if query is None else (query, True)


def _native_query(call: str) -> str | None:
    """The query of a call spelled as the rollout spells it, or ``None`` for any other spelling."""
    match = _NATIVE.fullmatch(call)
    if match is None:
        return None
    text: str = match[1] if match[1] is not None else match[2]
    return _ESCAPES.sub(_unescape, text) if "\\" in text else text


def _unescape(match: re.Match[str]) -> str:
    mark, digits = match[0][1], match[0][2:]
    return chr(int(digits, 16)) if digits else _SIMPLE_ESCAPES.get(mark, mark)


def _literal_call(call: str) -> tuple[str, bool]:
    """The query of a call in any spelling, and whether its ``top_n`` is ``TOP_N``."""
    if not _bounded(call):
        raise _not_a_call()
    try:
        # The parser warns of escapes like "\d". catch_warnings touches the whole process, so the
        # native spelling never comes here.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            node = ast.parse(call, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last: too complex for it
        raise _not_a_call() from None
    if (
        not isinstance(node, ast.Call)
        or not (isinstance(node.func, ast.Name) and node.func.id == "wikipedia_search")
        or node.args
    ):
        raise _not_a_call()
    values = {keyword.arg: keyword.value for keyword in node.keywords}
    query, top_n = values.get("query"), values.get("top_n")
    if (
        len(node.keywords) != 2
        or not (isinstance(query, ast.Constant) and isinstance(top_n, ast.Constant))
        or not isinstance(query.value, str)
    ):
        raise errors.INVALID_NATIVE_REQUEST(
            "call must have exactly a string query and the number top_n."
        )
    return query.value, type(top_n.value) is int and top_n.value == TOP_N


def _not_a_call() -> errors.InvalidRequest:
    return errors.INVALID_NATIVE_REQUEST("call must be one literal call of wikipedia_search.")


def _bounded(call: str) -> bool:
    """Whether ``call`` is made of few enough words that no parser can be driven deep by it."""
    words = end = 0
    while end < len(call):
        # Anchored: a search would start again inside a string that never ends, at every quote.
        token = _TOKEN.match(call, end)
        if token is None:
            return False
        words += token.lastgroup is not None
        if words > CALL_WORDS_MAX:
            return False
        end = token.end()
    return True


# --- the request ----------------------------------------------------------------------------------

_TAG: Final = re.compile(r"</?(?:answer|result|search|think)>", re.IGNORECASE)


def parse_execute(body: bytes, rules: ExecuteRules) -> ExecuteCall:
    """Read the body of ``POST /execute``: exactly ``env`` and ``call``.

    Raises: ``InvalidRequest`` with cause ``http_invalid_request`` (not strict JSON, or a call that
    has no UTF-8 form) or ``invalid_native_request`` (another shape, environment or call).
    """
    value = strict_json(body)
    if type(value) is not dict or value.keys() != {"env", "call"}:
        raise errors.INVALID_NATIVE_REQUEST("The body must be an object of exactly env and call.")
    env, call = value["env"], value["call"]
    if env != rules.environment:
        if type(env) is not str:
            raise errors.INVALID_NATIVE_REQUEST("env must be a string.")
        _require_accepted(env, rules.accepted_environment_sha256)
    if type(call) is not str:
        raise errors.INVALID_NATIVE_REQUEST("call must be a string.")
    try:
        return _read_call(env, call)
    except errors.InvalidRequest:
        if not rules.declines_calls:
            raise
    spelled = call.encode("utf-8", "backslashreplace").decode()
    return ExecuteCall(env, spelled, "", QueryProblem.invalid_call)


def _read_call(env: str, call: str) -> ExecuteCall:
    """A well-formed call. Raises ``InvalidRequest`` for what is wrong with any other one."""
    try:
        call_bytes = len(call.encode())
    except UnicodeEncodeError:
        raise errors.INVALID_JSON("call has no UTF-8 form.") from None
    query, top_n_is_five = parse_call(call)
    too_long = call_bytes > CALL_BYTES_MAX
    problem = QueryProblem.call_too_long if too_long else query_problem(query)
    if not top_n_is_five:
        # The query's fault is named first, as the reference does; alone it would not be refused.
        refusal = reference_refusal(problem) if problem else None
        raise (refusal or errors.INVALID_NATIVE_REQUEST)(f"top_n must be {TOP_N}.")
    if problem is not None and not has_utf8_form(query):
        query = ""
    return ExecuteCall(env, call, query, problem)


def query_problem(query: str) -> QueryProblem | None:
    """Why a text cannot be searched, or ``None`` where it can."""
    if not query.strip():
        return QueryProblem.empty
    try:
        query_bytes = len(query.encode())
    except UnicodeEncodeError:
        return QueryProblem.not_encodable
    if query_bytes > QUERY_BYTES_MAX:
        return QueryProblem.too_long
    return QueryProblem.protocol_tag if _TAG.search(query) else None


def reference_refusal(problem: QueryProblem) -> errors.Failure[errors.InvalidRequest] | None:
    """The failure a query is refused with under ``on_invalid_query = "latch"``.

    ``None`` for a protocol tag: there the call is admitted, counted as an attempt, and failed.
    """
    if problem is QueryProblem.protocol_tag:
        return None
    if problem is QueryProblem.not_encodable:
        return errors.INVALID_JSON
    return errors.INVALID_NATIVE_REQUEST


def declined_result(problem: str) -> str:
    """What a rollout is told where ``problem`` is declined; constant, so that it can be judged."""
    return DECLINED_CALL_RESULT if problem == QueryProblem.invalid_call else DECLINED_RESULT


def render_execute(result: str) -> bytes:
    return compact({"result": result, "output": "", "error": ""})
