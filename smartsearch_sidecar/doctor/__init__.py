"""Checks before a run: each thing it needs, one by one.

``findings`` is one line of the answer, ``machine`` checks this host, ``loopback`` proxy variables;
``examination`` checks the rest and puts all in order. Nothing of a run is created, and only a trial
call costs anything.
"""
