"""A run played before the run: the pinned client's shape against a scratch sidecar.

``scratch`` writes the copy of the configuration, ``rank`` is one rank of rollouts in a process of
its own, ``stage`` starts and ends the processes, ``tally`` counts and judges without any I/O.
"""
