"""A retriever of the operator's own: ``provider = "module:factory"``.

``factory()`` is called without arguments, once, and returns any object with the reference's two
methods::

    fingerprint() -> mapping       JSON values, with corpus_sha256 and index_sha256 (64 hex digits)
    search(query, top_n=5) -> list of {"id": str, "contents": str, "score"?: number}

and optionally ``close()``, and ``remote = False`` where the passages cannot change under it (unless
it says so they are watched for drift). What the factory needs it reads from the environment.

The module is imported, the factory called and both methods run in eight threads of this provider's
own, several at once: **an object that is not safe for threads must lock for itself.** The methods
are plain functions, not coroutines. A call that never returns holds its thread, but neither the
loop nor the end of the process (``daemon_threads.py``).

Apart from ``provider.py``, which opens it: one backend a file.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from smartsearch_sidecar import errors
from smartsearch_sidecar.daemon_threads import DaemonThreads
from smartsearch_sidecar.run.json_values import is_sha256

THREADS = 8  # as many as a node has slots by default
CLOSE_SECONDS = 5.0  # of the object's own ``close``; a retriever that hangs must not hold the drain
_SPEC = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


async def open_plugin(spec: str) -> PluginProvider:
    """A started provider; raises ``ConfigError`` with the sentence for the operator."""
    provider = PluginProvider(spec)
    try:
        await provider.start()
    except BaseException:
        await provider.close()
        raise
    return provider


class PluginProvider:
    """Runs a plain Python retriever off the loop. ``spec`` is also the provider's name."""

    def __init__(self, spec: str) -> None:
        if not _SPEC.fullmatch(spec):
            raise errors.CONFIG_INVALID(
                f"retrieval.provider = {spec!r} cannot be used: it must be bm25, flashrag, or a "
                "factory of your own as module:factory"
            )
        self.name = spec
        self.remote = True
        self._threads = DaemonThreads(THREADS, "the retriever", errors.PROVIDER_FAULT)
        self._object: Any = None

    async def start(self) -> None:
        """Imports the module, calls the factory and asks for the first fingerprint. Raises
        ``ConfigError`` where one of these fails, or the fingerprint lacks a digest.
        """
        self._object = await self._threads.run(lambda: _made(self.name))
        self.remote = getattr(self._object, "remote", True) is not False
        try:
            identity = await self.identity()
        except errors.ProviderFault as error:
            raise _unusable(self.name, error.message) from error
        except Exception as error:
            # The operator's code may raise anything; at start that is a configuration's fault.
            raise _unusable(self.name, f"fingerprint() raised {_said(error)}") from error
        for key in ("corpus_sha256", "index_sha256"):
            if not is_sha256(identity.get(key)):
                raise _unusable(
                    self.name, f"fingerprint() names no {key} of 64 lower-case hex digits"
                )

    async def identity(self) -> Mapping[str, Any]:
        """The object's fingerprint as JSON values. Raises what ``fingerprint()`` itself raises."""
        return await self._threads.run(lambda: _identity(self._object.fingerprint()))

    async def search(self, query: str, top_n: int) -> Sequence[Mapping[str, Any]]:
        """The object's documents, not yet checked. Raises what ``search()`` itself raises."""
        found: Sequence[Mapping[str, Any]] = await self._threads.run(
            lambda: _documents(self._object.search(query, top_n=top_n))
        )
        return found

    async def close(self) -> None:
        """Calls the object's ``close``, if it has one; calls still running are left behind."""
        made, self._object = self._object, None
        closing = getattr(made, "close", None)
        try:
            if callable(closing):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._threads.run(closing)
        except TimeoutError as error:
            raise errors.PROVIDER_FAULT(
                f"{self.name}: close() took over {CLOSE_SECONDS:g} s and was left behind"
            ) from error
        finally:
            self._threads.stop()


def _made(spec: str) -> object:
    """Imports, finds, calls and looks over; runs in a thread because imports may take minutes."""
    module_name, _, factory_name = spec.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        # Importing runs the operator's code: what it raises is why it cannot be imported.
        raise _unusable(
            spec, f"module {module_name} cannot be imported ({_said(error)}): is it on PYTHONPATH?"
        ) from error
    try:
        factory = getattr(module, factory_name)
    except AttributeError as error:
        raise _unusable(spec, f"module {module_name} has no {factory_name}") from error
    if not callable(factory):
        raise _unusable(spec, f"{factory_name} is a {type(factory).__name__}, not a factory")
    try:
        made: object = factory()
    except (Exception, SystemExit) as error:
        # The same: the factory is the operator's code.
        raise _unusable(spec, f"{factory_name}() raised {_said(error)}") from error
    for method in ("fingerprint", "search"):
        function = getattr(made, method, None)
        if not callable(function):
            raise _unusable(spec, f"what {factory_name}() returned has no method {method}")
        if inspect.iscoroutinefunction(function):
            raise _unusable(spec, f"{method} is a coroutine; it must be a plain method")
    return made


def _unusable(spec: str, why: str) -> errors.ConfigError:
    return errors.CONFIG_INVALID(f"retrieval.provider = {spec!r} cannot be used: {why}")


def _said(error: BaseException) -> str:
    """Type and first line of an exception of the operator's own code, bounded."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _identity(value: object) -> dict[str, Any]:
    plain = _plain(value)
    if not isinstance(plain, dict):
        kind = type(value).__name__
        raise errors.PROVIDER_FAULT(f"fingerprint() answered a {kind}, not a mapping")
    return plain


def _plain(value: object) -> Any:
    """JSON values only, so that two fingerprints compare and can be recorded."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    kind = type(value).__name__
    raise errors.PROVIDER_FAULT(f"fingerprint() holds a {kind}, which is not a JSON value")


def _documents(value: object) -> Any:
    """Sequences as lists, drawn in the thread; anything else is the guard's to refuse."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
