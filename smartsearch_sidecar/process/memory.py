"""Memory and threads that run out: how that shows, and which limit of the system stands behind it.

Apart from ``daemon.py``: it must be there when the daemon cannot even be imported.
"""

from __future__ import annotations

import errno
import resource
from typing import Final

from smartsearch_sidecar import errors

MIB: Final = 1024 * 1024
NO_THREAD: Final = "can't start new thread"
# What the interpreter, the loader of shared objects, and a library's own error say.
SAID: Final = (NO_THREAD, "failed to map segment", "Cannot allocate memory")
LIMITS: Final = (
    (resource.RLIMIT_AS, "the address space of a process is limited to {} MiB", "ulimit -v"),
    (resource.RLIMIT_DATA, "the data of a process is limited to {} MiB", "ulimit -d"),
)


def ran_out(exc: BaseException) -> bool:
    """Whether memory, or the room for one more thread, is why ``exc`` was raised."""
    if isinstance(exc, MemoryError) or getattr(exc, "errno", None) == errno.ENOMEM:
        return True
    return any(words in str(exc) for words in SAID)


def refusal(exc: BaseException) -> errors.UsageError:
    """The sentence for the operator: the limit that was met, and what to do."""
    for number, what, command in LIMITS:
        soft, _ = resource.getrlimit(number)
        if soft != resource.RLIM_INFINITY:
            return errors.MEMORY_LIMITED(
                f"memory ran out: {what.format(soft // MIB)} ({command}), and threads and a mapped "
                f"index reserve far more of it than they use: lift it ({command} unlimited), and "
                "bound the memory that is used (a container's limit, or MemoryMax= of systemd)"
            )
    if NO_THREAD in str(exc):
        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        limit = "" if soft == resource.RLIM_INFINITY else f" (ulimit -u is {soft})"
        return errors.MEMORY_LIMITED(
            f"no further thread can be started{limit}: raise the number of processes that this "
            "user or container may have (ulimit -u, TasksMax= of systemd, a container's pids limit)"
        )
    return errors.MEMORY_LIMITED(
        "memory ran out: give this machine or container more, or let less run beside the sidecar"
    )
