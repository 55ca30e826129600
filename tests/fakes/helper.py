"""A reward helper on 127.0.0.1 that speaks SGLang's and OpenAI's protocols and can misbehave.

Shapes and refusals are those of the real servers: SGLang's ``/generate`` takes only the sampling
parameters it knows (``sampling_seed`` among them, unless it is an old one) and trims the stop
string; a completion names its model, and a model that is not served is 404. Tokens are words.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from aiohttp import web

from tests.fakes.helper_answers import MISBEHAVIOUR, WRONG, as_json

MODEL = "Qwen/Qwen3-32B"
STOP = "</answer>"

SAMPLING_PARAMETERS = frozenset(
    {"temperature", "top_p", "top_k", "n", "max_new_tokens", "stop", "ignore_eos", "sampling_seed"}
)


@dataclass(frozen=True, slots=True)
class Call:
    """One completion as it arrived: its number from 1, route, body, headers, and the client's port,
    which names the connection."""

    number: int
    route: str
    body: dict[str, Any]
    headers: dict[str, str]
    peer: int

    @property
    def prompt(self) -> str:
        """The prompt, under whichever name the protocol has for it."""
        return str(self.body["text"] if self.route == "/generate" else self.body["prompt"])


class FakeHelper:
    """Knobs may be turned while it runs.

    Attributes:
        verdict: prompt to the text the model would write, stop string included.
        latency: seconds each completion takes; all of them run side by side.
        failure: name of an entry of ``WRONG`` or ``MISBEHAVIOUR``, for every call; or ``moved``
            or ``embedding``, for what it says of its model.
        failures: call number to failure.
        gate: completions wait here once they are counted; set unless a test clears it.
        model, weight_version: what it serves.
        knows_seed: false for an SGLang from before ``sampling_seed``.
        shows_model: false for a server without any route that shows its model.
        calls, busy, busiest, asked_model: what it has seen.
        abandoned: completions whose client left before the answer.
    """

    def __init__(self, *, latency: float = 0.0, model: str = MODEL) -> None:
        self.verdict: Callable[[str], str] = lambda _prompt: "<answer> 1 </answer>"
        self.latency = latency
        self.failure: str | None = None
        self.failures: dict[int, str] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.model = model
        self.weight_version = "default"
        self.knows_seed = True
        self.shows_model = True
        self.finish_as_word = False
        self.calls: list[Call] = []
        self.busy = self.busiest = self.abandoned = 0
        self.asked_model: Counter[str] = Counter()
        self.port = 0
        self._arrived = asyncio.Condition()
        self.stopping = asyncio.Event()
        self._runner: web.AppRunner | None = None

    # --- life ------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listens on a free port, or again on the one it had."""
        self.stopping.clear()
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/v1/completions", self._completions),
                web.get("/get_model_info", self._model_info),
                web.get("/model_info", self._model_info),
                web.get("/v1/models", self._models),
            ]
        )
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stops listening; requests that hang are released."""
        self.stopping.set()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def until_calls(self, count: int) -> None:
        """Returns once ``count`` completions have arrived."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.calls) >= count)

    async def until_abandoned(self, count: int) -> None:
        """Returns once ``count`` clients have left before their answer."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: self.abandoned >= count)

    # --- the protocols ---------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        parameters = body["sampling_params"]
        known = SAMPLING_PARAMETERS - ({"sampling_seed"} if not self.knows_seed else set())
        if set(parameters) - known:
            return web.Response(status=500, text="Internal Server Error")
        return await self._complete(request, body, parameters["stop"], self._generated)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["model"] != self.model:
            return as_json({"object": "error", "message": "no such model", "code": 404}, status=404)
        return await self._complete(request, body, body["stop"], self._completed)

    async def _complete(
        self,
        request: web.Request,
        body: dict[str, Any],
        stop: list[str],
        shape: Callable[[Call, str, str], dict[str, Any]],
    ) -> web.StreamResponse:
        peer = request.transport.get_extra_info("peername")[1] if request.transport else 0
        call = Call(len(self.calls) + 1, request.path, body, dict(request.headers), peer)
        self.calls.append(call)
        self.busy += 1
        self.busiest = max(self.busiest, self.busy)
        async with self._arrived:
            self._arrived.notify_all()
        try:
            await self.gate.wait()
            if self.latency:
                await asyncio.sleep(self.latency)
            text, matched, _ = self.verdict(call.prompt).partition(stop[0])
            answer = shape(call, text, "stop" if matched else "length")
            failure = self.failures.get(call.number, self.failure)
            if failure is None:
                return as_json(answer)
            if failure in WRONG:
                return as_json(WRONG[failure](answer))
            return await MISBEHAVIOUR[failure](request, answer, self.stopping)
        except asyncio.CancelledError:
            self.abandoned += 1
            async with self._arrived:
                self._arrived.notify_all()
            raise
        finally:
            self.busy -= 1

    def _generated(self, call: Call, text: str, finish: str) -> dict[str, Any]:
        reason = {"type": "stop", "matched": STOP} if finish == "stop" else {"type": finish}
        return {
            "text": text,
            "output_ids": list(range(len(text.split()))),
            "meta_info": {
                "id": f"{call.number:032x}",
                "finish_reason": finish if self.finish_as_word else reason,
                "prompt_tokens": len(call.prompt.split()),
                "weight_version": self.weight_version,
                "completion_tokens": len(text.split()),
                "cached_tokens": 0,
                "e2e_latency": 0.01,
            },
        }

    def _completed(self, call: Call, text: str, finish: str) -> dict[str, Any]:
        read, written = len(call.prompt.split()), len(text.split())
        return {
            "id": f"cmpl-{call.number}",
            "object": "text_completion",
            "created": 1760000000,
            "model": self.model,
            "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish}],
            "usage": {
                "prompt_tokens": read,
                "completion_tokens": written,
                "total_tokens": read + written,
            },
        }

    async def _model_info(self, request: web.Request) -> web.StreamResponse:
        self.asked_model[request.path] += 1
        if not self.shows_model or (request.path == "/get_model_info" and self.failure == "moved"):
            return as_json({"detail": "Not Found"}, status=404)
        return as_json(
            {
                "model_path": self.model,
                "tokenizer_path": self.model,
                "is_generation": self.failure != "embedding",
                "preferred_sampling_params": None,
                "weight_version": self.weight_version,
            }
        )

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self.asked_model[request.path] += 1
        if not self.shows_model:
            return as_json({"detail": "Not Found"}, status=404)
        card = {"id": self.model, "object": "model", "owned_by": "vllm", "root": self.model}
        return as_json({"object": "list", "data": [card]})
