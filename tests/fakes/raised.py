"""A failure expected by its row: a class is shared by many rows."""

from __future__ import annotations

from typing import Any

import pytest

from smartsearch_sidecar.errors import Failure, SidecarError


def raises(failure: Failure[Any], match: str | None = None) -> pytest.RaisesExc[SidecarError]:
    """``pytest.raises`` for exactly this row of the table of failures."""

    def is_row(exc: SidecarError) -> bool:
        return exc.failure is failure

    return pytest.RaisesExc(failure.family, match=match, check=is_row)
