"""One test over a table of cases that need no fixture of their own."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def each(
    names: str | Sequence[str],
    rows: Iterable[Any],
    *,
    ids: Sequence[str] | Callable[[Any], str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As ``pytest.mark.parametrize``, for pure functions: every case is tried, in one test.

    A test of its own costs each worker half a millisecond to collect and four to run and report. A
    case here costs what it calls, and those that fail are named together. Fixtures are shared by
    all cases, so none may keep anything of a case.
    """
    keys = re.findall(r"\w+", names) if isinstance(names, str) else list(names)
    table = list(rows)
    assert table, "a table without cases"

    def named(number: int, row: Any) -> str:
        if ids is None:
            return repr(row)
        return ids(row) if callable(ids) else ids[number]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def every(**fixtures: Any) -> None:
            failed: list[BaseException] = []
            for number, row in enumerate(table):
                values = row if len(keys) > 1 else (row,)
                try:
                    test(**fixtures, **dict(zip(keys, values, strict=True)))
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as exc:  # noqa: BLE001 - what pytest raises is no Exception
                    exc.add_note(f"case {named(number, row)}")
                    failed.append(exc)
            if failed:
                raise BaseExceptionGroup(f"{len(failed)} of {len(table)} cases", failed)

        signature = inspect.signature(test)
        kept = [value for name, value in signature.parameters.items() if name not in keys]
        vars(every)["__signature__"] = signature.replace(parameters=kept)
        del vars(every)["__wrapped__"]  # pytest would look at the signature of what is wrapped
        return every

    return decorate
