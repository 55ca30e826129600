"""The reward helper over HTTP: one exchange, measured, never sent twice.

What travels is in ``reward/wire.py``; here are connections, time and sizes. Whether a call may be
tried again depends on one fact, whether a connection was ever handed to it: until then nothing can
have been sent, and from then on it may have cost money, even if no answer comes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Self

import orjson

from smartsearch_sidecar import errors
from smartsearch_sidecar.outbound_http import ExchangeFailed, ExchangeFault, OutboundHttp
from smartsearch_sidecar.reward.wire import PROTOCOLS, HelperAnswer, Kind, address

ANSWER_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes of one answer. 2,048 tokens are some 20 KB; an over-long answer of a hundred times that is
still read, because it says what it has cost."""

CONNECT_TRIES: Final = 3
"""Attempts at a connection, each refused before anything was sent."""

CONNECT_PAUSE_SECONDS: Final = 0.25
"""Pause before the second attempt, twice as long before the third, and so on: a restarting proxy is
back by then, and a dead helper is reported within a second."""

CONNECT_SECONDS: Final = 10.0
"""Seconds for one attempt at a connection: a black hole is not worth the whole timeout."""

KEEPALIVE_SECONDS: Final = 1.0
"""Idle seconds after which a connection is dropped, well under the 5 s after which uvicorn (SGLang,
vLLM) drops it: a call written into a connection that the other end is just closing counts as sent,
cannot be sent again, and would end the run."""

_OK = 200
_NOT_SHOWN = frozenset({404, 405, 501})


class HelperClient:
    """The helper, as a pooled client without proxies, redirects, cookies or second tries.

    Args:
        kind: ``sglang`` or ``completions``.
        url: base address, http or https; the protocol's own path may be written out or left out.
        model: the name the server shows for what it serves.
        model_sha256: what the operator declares for the weights; 64 hex digits.
        timeout_seconds: for one exchange, connecting included.
        answer_bytes_max: bytes of one answer.
        connect_tries: attempts at a connection; ``pause`` waits between them (seconds).

    Concurrency is the caller's to bound (``scoring/helper_calls.py``). Close it when done.
    """

    def __init__(
        self,
        *,
        kind: Kind,
        url: str,
        model: str,
        model_sha256: str,
        timeout_seconds: float = 120.0,
        answer_bytes_max: int = ANSWER_BYTES_MAX,
        connect_tries: int = CONNECT_TRIES,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.kind = kind
        self.model = model
        self.model_sha256 = model_sha256
        self.timeout_seconds = timeout_seconds
        self._protocol = PROTOCOLS[kind]
        self._base, self.place = address(url, self._protocol.path)
        self._answer_bytes_max = answer_bytes_max
        self._connect_tries = connect_tries
        self._pause = pause
        self._http = OutboundHttp(
            connections_max=0,  # the dispatch bounds the calls at once
            keepalive_seconds=KEEPALIVE_SECONDS,
            connect_seconds=CONNECT_SECONDS,
        )
        self._shown: Mapping[str, str] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Drops every connection. Not before the last exchange has ended."""
        await self._http.close()

    # --- asking -----------------------------------------------------------------------------------

    async def ask(self, prompt: str, *, seed: int, deadline: float | None = None) -> HelperAnswer:
        """One completion: temperature 0.6, at most 2,048 tokens, stopped before ``</answer>``.

        ``deadline`` (seconds of the loop's clock) may end the exchange before ``timeout_seconds``
        does. Raises a ``HelperFault``, whose ``usage`` is what the exchange was measured at, if it
        was. Cancelled, it gives the exchange up, and what it has cost stays unknown.
        """
        try:
            body = orjson.dumps(self._protocol.request(prompt, model=self.model, seed=seed))
        except TypeError as exc:  # the edge lets no such text in, see contract/reward.py
            raise errors.INTERNAL_ERROR("a prompt has no UTF-8 form") from exc
        status, raw = await self._exchange("POST", self._protocol.path, body, self._until(deadline))
        if status != _OK:
            raise self._refused(status)
        answer = self._protocol.answer(raw, self.model)
        weights = (self._shown or {}).get("weight_version")
        if weights is not None and answer.weight_version not in {None, weights}:
            raise errors.HELPER_IDENTITY(
                f"the helper at {self.place} was given other weights while the run goes on: "
                "start a new run with the weights it is to be judged by",
                usage=answer.usage,
            )
        return answer

    # --- identity ---------------------------------------------------------------------------------

    async def identity(self) -> Mapping[str, Any]:
        """What names the helper: ``kind``, ``model``, ``model_sha256``, and in ``shown`` what the
        server says of itself (maybe nothing), checked as by ``check_identity``.
        """
        await self.check_identity()
        return {
            "kind": self.kind,
            "model": self.model,
            "model_sha256": self.model_sha256,
            "shown": dict(self._shown or {}),
        }

    async def check_identity(self) -> None:
        """Raises ``HelperIdentity`` unless the server shows the declared model, and still what it
        showed the first time it was asked.

        A server that cannot be asked raises the exchange's own ``HelperFault``.
        """
        shown = await self._ask_model()
        if self._shown is None:
            self._shown = shown
        elif shown != self._shown:
            raise errors.HELPER_IDENTITY(
                f"the helper at {self.place} no longer says of itself what it said at first: "
                "another server, or other weights, answer there now"
            )

    async def _ask_model(self) -> Mapping[str, str]:
        until = self._until(None)
        for path in self._protocol.model_paths:
            status, raw = await self._exchange("GET", path, None, until)
            if status == _OK:
                return self._protocol.shown(raw, self.model)
            if status not in _NOT_SHOWN:
                raise self._refused(status)
        return {}

    # --- one exchange -----------------------------------------------------------------------------

    def _until(self, deadline: float | None) -> float:
        own = asyncio.get_running_loop().time() + self.timeout_seconds
        return own if deadline is None else min(own, deadline)

    def _refused(self, status: int) -> errors.HelperFault:
        if 300 <= status < 400:
            return errors.HELPER_REDIRECT(
                f"the helper at {self.place} answered with redirect {status}, not followed "
                "because prompts hold answers: set reward.helper.url to where it leads"
            )
        return errors.HELPER_STATUS(
            f"the helper at {self.place} answered {status} instead of 200: see its log "
            "(404: wrong reward.helper.kind, url or model; 400 or 500 from an SGLang that does not "
            "know sampling_seed: upgrade it, or use kind = completions)"
        )

    async def _exchange(
        self, method: str, path: str, body: bytes | None, until: float
    ) -> tuple[int, bytes]:
        """Status and body, the body only of a 200. ``until`` is in seconds of the loop's clock.

        Further attempts are made only while nothing was sent: from then on a call may have cost
        money, even if no answer comes.
        """
        self._http.open()
        for attempt in itertools.count(1):
            try:
                # In a task of its own: each piece of an answer wakes this one coroutine, and not
                # all those that wait for it. Cancelled with it, as an awaited coroutine is.
                answer = await asyncio.create_task(
                    self._http.exchange(
                        method,
                        self._base + path,
                        body,
                        until=until,
                        bytes_max=self._answer_bytes_max,
                        json_only=True,
                    )
                )
            except ExchangeFailed as error:
                last = error.failure is ExchangeFault.LATE or attempt >= self._connect_tries
                if error.sent or last:
                    raise self._fault(error) from error
            else:
                return answer.status, answer.body
            await self._pause_until(CONNECT_PAUSE_SECONDS * attempt, until)
        raise errors.INTERNAL_ERROR("an exchange ended without an answer or an error")

    async def _pause_until(self, seconds: float, until: float) -> None:
        try:
            async with asyncio.timeout_at(until):
                await self._pause(seconds)
        except TimeoutError:
            raise self._unreachable("not in time") from None

    def _fault(self, error: ExchangeFailed) -> errors.HelperFault:
        """What an exchange without a usable answer is to the run."""
        if not error.sent:
            late = error.failure is ExchangeFault.LATE
            return self._unreachable("not in time" if late else error.why)
        if error.failure is ExchangeFault.LATE:
            return errors.HELPER_TIMEOUT(
                f"the helper at {self.place} did not answer in time: it hangs or has too much "
                "to do (reward.helper.timeout_seconds, reward.helper.concurrency)"
            )
        if error.failure is ExchangeFault.OTHER_MEDIA:
            return errors.HELPER_NOT_JSON(
                f"{self.place} answered with another media type than application/json: "
                "a proxy or a login page stands before the helper"
            )
        if error.failure is ExchangeFault.COMPRESSED:
            return errors.HELPER_ANSWER_INVALID(
                f"the helper at {self.place} compressed its answer although it was told not to"
            )
        if error.failure is ExchangeFault.TOO_LONG:
            return errors.HELPER_ANSWER_INVALID(
                f"the helper at {self.place} answered with more than {self._answer_bytes_max} bytes"
            )
        if error.answered:
            return errors.HELPER_TRUNCATED(
                f"the helper at {self.place} broke off in the middle of its answer ({error.why})"
            )
        return errors.HELPER_TRANSPORT(
            f"the connection to the helper at {self.place} was lost after the call had been "
            f"sent ({error.why}); what it has cost is unknown, so it is not sent again"
        )

    def _unreachable(self, why: str) -> errors.HelperUnreachable:
        return errors.HELPER_UNREACHABLE(
            f"no connection to the helper at {self.place} ({why}): start it, or set "
            "reward.helper.url"
        )
