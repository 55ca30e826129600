"""The operator's page: one file, read when this module is imported, served as it is.

Its script and style stand in it, and the policy names them by their digests: a browser runs nothing
else, even where a query or a passage holds a script.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files
from typing import Final

HTML: Final = files(__package__).joinpath("index.html").read_bytes()


def _digests(element: bytes) -> str:
    contents = re.findall(rb"<%b>(.*?)</%b>" % (element, element), HTML, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(one).digest()).decode() for one in contents)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


HEADERS: Final = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_digests(b'script')}; style-src {_digests(b'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Beside those of every answer. The page's address holds a capability: it is sent nowhere."""
