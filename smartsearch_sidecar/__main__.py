"""``python -m smartsearch_sidecar``: the command line without its console script."""

from __future__ import annotations

from smartsearch_sidecar.commands import main

if __name__ == "__main__":
    main()
