"""A load test before the run: the pinned client's calls against a scratch sidecar.

``client_worker`` is one rank of rollouts in a process of its own; ``processes`` starts and ends the
scratch sidecar and the ranks, counts and judges.
"""
