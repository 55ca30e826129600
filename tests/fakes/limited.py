"""The sidecar's command with ``DESCRIPTORS`` file descriptors, as ``ulimit -n`` sets them."""

from __future__ import annotations

import os
import resource
import runpy

if __name__ == "__main__":
    descriptors = int(os.environ["DESCRIPTORS"])
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    runpy.run_module("smartsearch_sidecar", run_name="__main__", alter_sys=True)
