"""What sections and keys are made of: strict, frozen models, three ways to declare a key."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

MIB = 1024 * 1024


class Section(BaseModel):
    """What all sections have in common."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", hide_input_in_errors=True)


def key(default: Any, why: str) -> Any:
    """A key whose type says what is allowed."""
    return Field(default, description=why)


def whole(default: int, low: int, high: int, unit: str, why: str) -> Any:
    """A whole number with both bounds and a unit (empty for what only names: a port, a seed)."""
    return Field(default, ge=low, le=high, description=why, json_schema_extra={"unit": unit})


def seconds(default: float, high: float, why: str) -> Any:
    """A duration: above zero, fractions allowed."""
    return Field(default, gt=0, le=high, description=why, json_schema_extra={"unit": "seconds"})
