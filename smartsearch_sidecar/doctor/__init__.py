"""Checks before a run: each thing it needs, one by one.

``findings`` is one line of the answer. ``machine`` checks this host, ``loopback`` proxy variables,
``retriever`` the retriever, ``scoring`` scorer, references and helper: one file for each thing that
can be wrong. ``examination`` puts them in order. Nothing of a run is created, and only a trial call
costs anything.
"""

from __future__ import annotations
