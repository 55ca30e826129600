"""What an operator finds out before the GPUs do: each thing a run needs, looked at one by one.

``findings`` is a line of the answer; ``machine`` looks at this host, ``loopback`` at what would
capture the rollouts' calls, ``retriever`` at who searches, ``scoring`` at who scores; ``examine``
puts them in order. Nothing of a run is created, and only a trial call costs anything.
"""

from __future__ import annotations

from smartsearch_sidecar.doctor.examination import Asked, examine
from smartsearch_sidecar.doctor.findings import Finding, Level

__all__ = ["Asked", "Finding", "Level", "examine"]
