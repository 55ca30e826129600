"""The text of a call to its query: a literal ``wikipedia_search(query=<str>, top_n=5)``, never run.

What the rollout writes (a ``repr()`` of the policy's text) is read by one regular expression; any
other spelling Python itself would take is read by ``ast``, after a bound on its size that is ours,
so the verdict is the same on every interpreter.
"""

from __future__ import annotations

import ast
import re
import warnings
from typing import Final

from smartsearch_sidecar import errors

TOP_N: Final = 5
"""Passages of one search: the number in every call of the dataset's environment."""
CALL_WORDS_MAX: Final = 138
"""Names, numbers and marks in a call outside strings: ten, and 64 pairs of parentheses more."""

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
