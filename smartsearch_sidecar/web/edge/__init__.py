"""Bytes to requests, answers to bytes: the one room that leans on aiohttp's insides.

aiohttp parses and keeps connections. This room replaces what it does with bytes that are no
request, with handlers that fail and with clients that leave, because each of those becomes training
text on the other side. Three promises:

- What no handler answers, a constant answers, and the observer is told. Nothing of a request is
  logged or echoed; aiohttp's own error pages and tracebacks never run.
- An answer that was handed over is reported lost if its client never took it, as far as the kernel
  can tell: POLLRDHUP before the write, POLLERR at the write, and afterwards a reset, which Linux
  sends where a socket is closed with unread bytes. Bytes that come after an answer prove that it
  was taken; with pipelining that proof is weaker, since the bytes may have been sent before. Two
  things stay unseen: a client that has given up but not closed, and a reset after the FINs of both
  sides.
- Every wait is bounded: by the constants of these files, and by ``keepalive_seconds`` for headers
  and idle connections.

``server.py`` accepts connections once ``runtime.py`` has checked what the other files lean on. A
caller imports each name from the file that owns it.
"""
