"""The two profiles: what each presets, as one table.

A profile only presets: every key can still be set by itself, and after loading none of them is
left open.
"""

from __future__ import annotations

from typing import Any, Final, Literal

Profile = Literal["training", "reference"]

# For each key what training presets, then what reference does.
PRESETS: Final[dict[str, tuple[Any, Any]]] = {
    "run.on_unclean_restart": ("latch", "latch"),
    "execute.waiting_max": (512, 0),
    "execute.body_bytes_max": (262_144, 16_384),
    "execute.on_invalid_query": ("decline", "latch"),
    "execute.on_undelivered": ("latch", "latch"),
    "retrieval.retries": (2, 0),
    "retrieval.cache_mib": (64, 0),
    "retrieval.on_protocol_tag": ("drop", "latch"),
    "retrieval.on_drift": ("latch", "off"),
    "reward.provenance": ("enforce", "off"),
    "reward.side_by_side": (True, False),
    "reward.reuse_identical": (True, False),
    "reward.unparsed_share_max": (0.2, 1.0),
}


def preset(key: str, profile: object = "training", *, nodes: int = 1) -> Any:
    """What ``profile`` sets ``key`` to, in a run of ``nodes`` trainer nodes.

    What is no profile presets as training does: it is refused elsewhere, with everything else.
    """
    if key == "reward.provenance" and profile != "reference" and nodes > 1:
        # One sidecar cannot know what the others answered: it can record, not refuse.
        return "record"
    training, reference = PRESETS[key]
    return reference if profile == "reference" else training
