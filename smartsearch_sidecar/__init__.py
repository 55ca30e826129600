"""SmartSearch sidecar: search and rewards for a trainer node, recorded first, failing closed."""

from __future__ import annotations

__version__ = "0.1.0"
