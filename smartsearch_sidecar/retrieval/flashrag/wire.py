"""Where a FlashRAG retriever may stand and what it may answer, as values and without HTTP.

Apart from ``provider.py``, which alone uses it: bytes are judged here without a connection.

No message quotes a body: it may hold anything, passages included. ``subject`` begins each one,
e.g. ``the retriever at http://10.0.0.7:9000 answered /search with``.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

import orjson

from smartsearch_sidecar import errors

Documents = list[dict[str, Any]]

REFUSED = (400, 422)
"""How FastAPI refuses a query: the first by its handler, the second by its request model."""

MISSING = (404, 405)
"""The route is not served."""

_MEDIA_TYPE = re.compile(r"[a-z0-9.+-]{1,40}/[a-z0-9.+-]{1,40}")


def answered(where: str, route: str) -> str:
    """How a sentence about an answer begins: the ``subject`` of the functions below."""
    return f"{where} answered /{route} with"


def parse_url(text: str) -> tuple[str, str]:
    """The URL that routes are appended to, and the ``host:port`` that messages name.

    Raises ``ConfigError``.
    """
    try:
        url = urlsplit(text)
        usable = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        raise _unusable("it is not a URL") from None
    if not usable:
        raise _unusable("it must begin with http:// or https:// and name a host")
    if "@" in url.netloc:
        raise _unusable("it must not hold credentials")
    if url.query or url.fragment:
        raise _unusable("it must have no query and no fragment")
    if url.path.rstrip("/").endswith(("/search", "/batch_search")):
        raise _unusable("it must name the service, without the route")
    return text.rstrip("/"), url.netloc


def _unusable(why: str) -> errors.ConfigError:
    return errors.CONFIG_INVALID(f"retrieval.flashrag.url cannot be used: {why}")


def parse_status(status: int, subject: str) -> int:
    """200, ``REFUSED`` and ``MISSING`` as they are; every other is a fault."""
    if status == 200 or status in REFUSED or status in MISSING:
        return status
    if 300 <= status < 400:
        raise errors.PROVIDER_FAULT(f"{subject} a redirect ({status}), which is not followed")
    raise errors.PROVIDER_FAULT(f"{subject} status {status}")


def parse_json(body: bytes, media: str, subject: str) -> object:
    """The JSON value of a body with status 200; an error page of a proxy is named as one."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise errors.PROVIDER_FAULT(f"{subject} {_describe(body, media.lower())}") from error


def parse_documents(value: object, subject: str) -> Documents:
    """The answer to one search. What a document holds is the guard's to check."""
    if not isinstance(value, list):
        raise errors.PROVIDER_FAULT(f"{subject} {_kind(value)} instead of a list of documents")
    for document in value:
        if not isinstance(document, dict):
            raise errors.PROVIDER_FAULT(f"{subject} {_kind(document)} instead of a document")
    return value


def parse_lists(value: object, searches: int, subject: str) -> list[Documents]:
    """The answer to a batch: one list of documents per search, in order."""
    if not isinstance(value, list):
        raise errors.PROVIDER_FAULT(f"{subject} {_kind(value)} instead of a list of lists")
    if len(value) != searches:
        raise errors.PROVIDER_FAULT(f"{subject} {len(value)} lists for {searches} queries")
    return [parse_documents(documents, subject) for documents in value]


def _kind(value: object) -> str:
    if value is None:
        return "null"
    for kind, name in ((dict, "an object"), (list, "a list"), (str, "a string")):
        if isinstance(value, kind):
            return name
    return "a number or boolean"


def _describe(body: bytes, media: str) -> str:
    if "html" in media or body.lstrip()[:1] == b"<":
        return (
            f"an HTML page of {len(body)} bytes and status 200: "
            "a proxy or another service stands at retrieval.flashrag.url"
        )
    named = media if _MEDIA_TYPE.fullmatch(media) else "an unreadable media type"
    return f"{len(body)} bytes of {named} that are not JSON"
