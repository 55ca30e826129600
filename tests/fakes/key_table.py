"""What the table of keys says of one, as ``make readme`` writes it."""

from __future__ import annotations

import runpy
from collections.abc import Callable

from tests.fakes.process import ROOT

_WRITER = runpy.run_path(str(ROOT / "config" / "write_readme.py"))

document: Callable[[], str] = _WRITER["document"]
meaning: Callable[[str], str] = _WRITER["meaning"]
