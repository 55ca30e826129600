"""verl's tool agent loop, as far as a tool and a reward can tell it apart: our own writing.

As verl has it: the calls of a turn run side by side and are begun in their order; what ``create``
or ``execute`` raises becomes the tool's message, what ``release`` raises fails the trajectory; a
long message is cut and says so; an unknown tool, or arguments that are no JSON, are answered by the
loop itself; a turn of tool messages that would pass the response's limit is left out, and the
rollout ends; what a tool puts into ``extra_fields`` travels to the reward managers by pickle. The
chat template is Qwen's: tool messages stand in one user turn, each in a ``<tool_response>``.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import pickle
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from tests.fakes import rollouts
from tests.fakes.trainer import Tokenizer

FILE = (
    Path(__file__).resolve().parents[2]
    / "smartsearch_sidecar"
    / "integrations"
    / "verl_search_tool.py"
)
STABLE_KEYS = {"turn_scores", "tool_rewards", "min_global_steps", "max_global_steps", "extras"}
"""The keys of ``extra_fields`` that every row of verl has, or is given as ``None``."""
CALL = re.compile(r"<tool_call>\n?(.*?)\n?</tool_call>", re.DOTALL)


class ToolResponse(BaseModel):
    """As verl has it, less images."""

    text: str | None = None


class FunctionSchema(BaseModel):
    """The function that a policy is shown."""

    name: str
    description: str
    parameters: dict[str, Any]


class ToolSchema(BaseModel):
    """As verl has it, less its inner models."""

    type: str
    function: FunctionSchema


@contextmanager
def tool_file(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The file of the search tool, loaded afresh as verl loads it, beside verl's own names."""
    schemas = types.ModuleType("verl.tools.schemas")
    schemas.ToolResponse = ToolResponse  # type: ignore[attr-defined]
    schemas.OpenAIFunctionToolSchema = ToolSchema  # type: ignore[attr-defined]
    for name in ("verl", "verl.tools"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "verl.tools.schemas", schemas)
    spec = importlib.util.spec_from_file_location("verl_search_tool", FILE)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "verl_search_tool", loaded)
    spec.loader.exec_module(loaded)
    try:
        yield loaded
    finally:
        loaded._THREADS.shutdown()


def call(query: Any, name: str = "wikipedia_search") -> str:
    """A tool call as the policy writes it."""
    value = {"name": name, "arguments": {"query": query}}
    return f"<tool_call>\n{json.dumps(value, ensure_ascii=False)}\n</tool_call>"


@dataclass
class AgentData:
    """What a tool is handed of its trajectory."""

    ids: list[int]
    limit_from: int
    extra_fields: dict[str, Any] = field(default_factory=dict)
    assistant_turns: int = 0
    user_turns: int = 0

    @property
    def response_length(self) -> int:
        return len(self.ids) - self.limit_from


@dataclass
class ToolLoop:
    """One agent loop of a worker. ``spoil`` changes a tool's message on its way into the text."""

    tool: Any
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    response_length: int = 100_000
    max_tool_response_length: int = 20_000
    truncate_side: str = "middle"
    max_parallel_calls: int = 1
    spoil: Callable[[str], str] = str

    async def run(self, question: str, turns: Iterable[str], **columns: Any) -> dict[str, Any]:
        """The rollout whose policy writes these turns, as a row for a reward manager."""
        schema = self.tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)
        assert schema["function"]["name"] == self.tool.name
        prompt = self.tokenizer.encode(rollouts.prompt(question))
        data = AgentData(list(prompt), len(prompt))
        for turn in turns:
            self._generated(data, turn)
            calls = CALL.findall(turn)
            if data.response_length >= self.response_length or not calls:
                break
            if not await self._answered(data, calls[: self.max_parallel_calls]):
                break
        data.extra_fields |= {"turn_scores": [], "tool_rewards": [0.0] * data.user_turns}
        ids = data.ids[len(prompt) :][: self.response_length]
        return {
            "prompt": rollouts.prompt(question),
            "response": self.tokenizer.decode(ids),
            "extra_info": {"question": question},
            "tool_extra_fields": pickle.loads(pickle.dumps(data.extra_fields)),  # noqa: S301 - ours
            "__num_turns__": data.assistant_turns + data.user_turns + 1,
            **columns,
        }

    def _generated(self, data: AgentData, turn: str) -> None:
        if not data.extra_fields:
            data.extra_fields.update(global_steps=1, min_global_steps=1, max_global_steps=1)
        data.assistant_turns += 1
        data.ids += self.tokenizer.encode(f"{turn}<|im_end|>")

    async def _answered(self, data: AgentData, calls: list[str]) -> bool:
        """Whether the messages had room."""
        told = await asyncio.gather(*(self._call(one, data) for one in calls))
        blocks = "".join(f"\n<tool_response>\n{text}\n</tool_response>" for text in told)
        turn = f"\n<|im_start|>user{blocks}<|im_end|>\n<|im_start|>assistant\n"
        ids = self.tokenizer.encode(turn)
        if data.response_length + len(ids) >= self.response_length:
            return False
        data.ids += ids
        data.user_turns += 1
        return True

    async def _call(self, written: str, data: AgentData) -> str:
        try:
            value = json.loads(written)
            name, arguments = value["name"], value["arguments"]
        except (ValueError, LookupError, TypeError):
            return "Invalid JSON in arguments"
        if name != self.tool.name:
            return f"Unknown function '{name}'"
        instance_id = None
        try:
            instance_id, _ = await self.tool.create(create_kwargs={})
            response, _, _ = await self.tool.execute(instance_id, arguments, agent_data=data)
        except Exception as exc:  # noqa: BLE001 - as verl does
            return f"Error executing tool: {exc}"
        finally:
            if instance_id:
                await self.tool.release(instance_id)
        return self._cut(self.spoil(str(response.text)))

    def _cut(self, text: str) -> str:
        most = self.max_tool_response_length
        if len(text) <= most:
            return text
        if self.truncate_side == "left":
            return "(truncated)..." + text[-most:]
        if self.truncate_side == "right":
            return text[:most] + "...(truncated)"
        half = most // 2
        return text[:half] + "...(truncated)..." + text[-half:]


def reward_config(manager: str = "naive") -> Any:
    """What verl's own loader of a reward holds under the name ``config``."""
    return SimpleNamespace(reward=SimpleNamespace(reward_manager=SimpleNamespace(name=manager)))
