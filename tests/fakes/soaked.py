"""Cases that only ``make soak`` tries."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet


def soaked(seeds: Iterable[int]) -> list[ParameterSet]:
    """Seeds that only ``make soak`` tries."""
    return [pytest.param(seed, marks=pytest.mark.soak) for seed in seeds]
