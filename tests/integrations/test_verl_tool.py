"""The search tool for current verl, driven as verl's agent loop drives a tool, against a daemon."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.provider import FakeProvider, documents_for
from tests.fakes.served import EXECUTE_CAPABILITY, INTERNAL_CAPABILITY, Served, served
from tests.fakes.tool_loop import FILE, ToolResponse, ToolSchema, tool_file
from tests.fakes.until import until

VARIABLE = "SMARTSEARCH_SIDECAR_ENDPOINTS"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The file, loaded afresh as verl loads a tool's module, beside verl's own names."""
    with tool_file(monkeypatch) as loaded:
        yield loaded


@asynccontextmanager
async def beside(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    provider: FakeProvider | None = None,
    **keys: Any,
) -> AsyncIterator[Served]:
    """A daemon, and the variable that names its endpoints."""
    async with served(tmp_path / "run", provider=provider, **keys) as run:
        monkeypatch.setenv(VARIABLE, str(run.directory / "endpoints.json"))
        yield run


async def called(tool: Any, arguments: Any) -> str:
    """A tool call in verl's order: what ``execute`` raises becomes a message, what ``release``
    raises does not, and nothing is released where ``create`` raised.
    """
    instance_id = None
    try:
        instance_id, _ = await tool.create(create_kwargs={})
        response, _, _ = await tool.execute(instance_id, arguments, agent_data=object())
    except Exception as exc:  # noqa: BLE001 - as verl does
        return f"Error executing tool: {exc}"
    finally:
        if instance_id:
            await tool.release(instance_id)
    return str(response.text)


def begun(tool: Any) -> list[dict[str, Any]]:
    """What verl shows the policy of a new trajectory, read as its agent loop reads it."""
    return [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)]


def joined(query: str) -> str:
    return "\n\n".join(document["contents"] for document in documents_for(query))


# --- good answers ---------------------------------------------------------------------------------


async def test_a_search_is_answered_by_the_sidecar(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tool's text is the recorded answer, word for word, for any query that can be written."""
    tool = module.SidecarSearch({"type": "native"})
    async with beside(tmp_path, monkeypatch) as run:
        for query in ("Ada", "a 'quoted' \"one\"\n東 \\n", "  spaced "):
            assert await called(tool, {"query": query}) == joined(query.strip())
        health = (await run.health())[1]
        assert (health["state"], health["retrieval_responses"]) == ("healthy", 3)


@pytest.mark.parametrize(
    "arguments",
    [
        {"query": " "},
        {"query": "x </search>"},
        {"query": "\ud800"},
        {"query": ["a"]},
        {},
        ["a"],
        None,
    ],
)
async def test_what_the_policy_gets_wrong_is_no_failure(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any
) -> None:
    """It is declined by the sidecar, recorded and counted; the run stays healthy."""
    tool = module.SidecarSearch({"type": "native"})
    async with beside(tmp_path, monkeypatch) as run:
        assert await called(tool, arguments) == "invalid query"
        assert await called(tool, {"query": "Ada"}) == joined("Ada")
        health = (await run.health())[1]
        assert (health["state"], health["retrieval_declined"]) == ("healthy", 1)


async def test_searches_of_a_process_run_side_by_side(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trajectories do not wait for each other, up to as many as the sidecar serves at once."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    tool = module.SidecarSearch({"type": "native"})
    async with beside(tmp_path, monkeypatch, provider):
        tasks = [asyncio.create_task(called(tool, {"query": f"q{n}"})) for n in range(20)]
        await until(lambda: provider.under_way == module.SEARCHES_AT_ONCE)
        provider.gate.set()
        assert await asyncio.gather(*tasks) == [joined(f"q{n}") for n in range(20)]


async def test_the_configuration_may_name_everything(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another place of endpoints.json, another environment, another name and description."""
    async with beside(tmp_path, monkeypatch, execute__environment="ours") as run:
        monkeypatch.delenv(VARIABLE)
        config = {"endpoints": str(run.directory / "endpoints.json"), "environment": "ours"}
        schema = ToolSchema.model_validate(
            {
                "type": "function",
                "function": {"name": "search", "description": "d", "parameters": {}},
            }
        )
        tool = module.SidecarSearch(config, schema)
        assert (tool.name, tool.get_openai_tool_schema()) == ("search", schema)
        assert await called(tool, {"query": "Ada"}) == joined("Ada")


def test_the_policy_is_shown_a_query_and_nothing_else(module: Any) -> None:
    """The number of passages is the run's, so the policy is not asked for one."""
    tool = module.SidecarSearch({"type": "native"})
    assert tool.name == "wikipedia_search"
    parameters = tool.tool_schema.function.parameters
    assert (list(parameters["properties"]), parameters["required"]) == (["query"], ["query"])


# --- failures -------------------------------------------------------------------------------------


async def expect_raised(tool: Any, words: str) -> None:
    """The failure passes verl's agent loop, and so does every later call in this process."""
    with pytest.raises(RuntimeError, match=words) as first:
        await called(tool, {"query": "Ada"})
    with pytest.raises(RuntimeError, match=f"failed before: .*{words}") as second:
        await called(tool, {"query": "Bob"})
    for caught in (first, second):
        assert type(caught.value) is RuntimeError
        assert type(pickle.loads(pickle.dumps(caught.value))) is RuntimeError  # noqa: S301 - ours
        for capability in (EXECUTE_CAPABILITY, INTERNAL_CAPABILITY):
            assert capability not in str(caught.value)


async def test_a_failed_search_fails_its_trajectory(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sidecar's error becomes no tool message: it is raised, by a tool made later as well."""
    provider = FakeProvider()
    provider.fault = RuntimeError("broken")
    async with beside(tmp_path, monkeypatch, provider) as run:
        await expect_raised(module.SidecarSearch({}), "the sidecar answered retrieval_failed")
        provider.fault = None
        await expect_raised(module.SidecarSearch({}), "retrieval_failed")
        assert run.service.run.state.attempts == 1  # refused here: the second never left


async def test_no_trajectory_begins_after_a_failure(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl drops a trajectory that fails and goes on with the others: without this it would go on
    with those that never search.
    """
    async with beside(tmp_path, monkeypatch) as run:
        tools = [module.SidecarSearch({}), module.SidecarSearch({})]
        assert [schema["function"]["name"] for schema in begun(tools[0])] == ["wikipedia_search"]
        assert await called(tools[0], {"query": "Ada"}) == joined("Ada")
        await run.internal("POST", "/latch", {"reason": "by hand"})
        assert begun(tools[0])  # this process has not met it yet
        with pytest.raises(RuntimeError):
            await called(tools[0], {"query": "Bob"})
        for tool in (*tools, module.SidecarSearch({})):
            with pytest.raises(RuntimeError, match=r"failed before: .*retrieval_failed") as caught:
                begun(tool)
            assert type(caught.value) is RuntimeError


async def test_the_first_failure_is_the_last(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has failed sends no further search, also after the cause has gone."""
    async with beside(tmp_path, monkeypatch) as run:
        nowhere = module.SidecarSearch({"endpoints": str(tmp_path / "nothing")})
        await expect_raised(nowhere, "cannot be read")
        await expect_raised(module.SidecarSearch({}), "cannot be read")
        assert run.provider.queries == []


async def test_execute_itself_raises(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent loop that does not catch needs no release to notice."""
    async with beside(tmp_path, monkeypatch) as run:
        await run.internal("POST", "/latch", {"reason": "by hand"})
        with pytest.raises(RuntimeError, match="retrieval_failed"):
            await module.SidecarSearch({}).execute("id", {"query": "Ada"})


async def test_a_begun_call_never_raises(module: Any) -> None:
    """What create raised would become a message, and nothing would be released after it."""
    module._FAILED.first = "before"
    assert await module.SidecarSearch({}).create("given") == ("given", ToolResponse())
    (made, _) = await module.SidecarSearch({}).create()
    assert len(made) == 36


@asynccontextmanager
async def stranger(body: bytes) -> AsyncIterator[str]:
    """Something at another port that answers everything with 200 and these bytes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/{EXECUTE_CAPABILITY}"
    finally:
        server.close()
        await server.wait_closed()


def endpoints(path: Path, **urls: str) -> str:
    """A file as the sidecar leaves it."""
    path.touch(0o600)
    path.write_text(json.dumps(urls))
    return str(path)


async def test_a_failure_the_sidecar_cannot_see_closes_its_latch(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something else answered at the port: the run is told by its internal route."""
    async with beside(tmp_path, monkeypatch) as run, stranger(b"<ok>") as url:
        internal = run.endpoints.internal_url
        path = endpoints(tmp_path / "other.json", sandbox_url=url, internal_url=internal)
        await expect_raised(module.SidecarSearch({"endpoints": path}), "another program")
        cause = (await run.health())[1]["cause"]
        assert cause["cause"] == "trainer_reported"
        assert cause["detail"].startswith("the search tool: no search: ")


@pytest.mark.parametrize(
    "body",
    [
        b'{"result": null, "output": "", "error": ""}',
        b'["result"]',
        b'"result"',
        b"[" * 100_000,
        b"",
    ],
)
async def test_only_a_text_is_an_answer(module: Any, tmp_path: Path, body: bytes) -> None:
    """Any other 200 is a failure, not an empty message."""
    async with stranger(body) as url:
        path = endpoints(tmp_path / "other.json", sandbox_url=url, internal_url=url)
        await expect_raised(module.SidecarSearch({"endpoints": path}), "another program")


async def test_a_capability_that_is_echoed_goes_no_further(module: Any, tmp_path: Path) -> None:
    """A proxy's page names the address it was asked for; the message raised does not."""
    body = json.dumps({"error": {"code": "proxy", "message": f"/{EXECUTE_CAPABILITY}"}}).encode()
    async with stranger(body) as url:
        path = endpoints(tmp_path / "other.json", sandbox_url=url, internal_url=url)
        asked = await asyncio.to_thread(module._url, "sandbox_url", path)
        status, value = await asyncio.to_thread(module._ask, asked, "/x", {}, 5.0)
        assert (status, value["error"]["message"]) == (200, "/***")


async def test_a_sidecar_that_hangs_is_a_failure(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tool times out by itself, and the sidecar notices that its answer was not delivered."""
    provider = FakeProvider()
    provider.gate = asyncio.Event()
    async with beside(tmp_path, monkeypatch, provider) as run:
        tool = module.SidecarSearch({"timeout_seconds": 0.2})
        await expect_raised(tool, "gave no answer")
        provider.gate.set()
        await until(lambda: run.service.run.state.closed and run.service.run.state.settled)


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (None, 0o600, "cannot be read"),
        ("{}", 0o600, "is not the endpoints.json"),
        ("[]", 0o600, "is not the endpoints.json"),
        ("not json", 0o600, "is not the endpoints.json"),
        ('{"sandbox_url": "https://127.0.0.1:1/c"}', 0o600, "is not the endpoints.json"),
        ('{"sandbox_url": "http://127.0.0.1/c"}', 0o600, "is not the endpoints.json"),
        ('{"sandbox_url": "http://127.0.0.1:1/c"}', 0o640, "chmod it to 600"),
        ('{"sandbox_url": "http://127.0.0.1:1/c"}', 0o600, "gave no answer"),
    ],
)
async def test_endpoints_that_cannot_be_used(
    module: Any, tmp_path: Path, content: str | None, mode: int, words: str
) -> None:
    """Each is one sentence with its remedy, raised at the first search and not before."""
    path = tmp_path / "endpoints.json"
    if content is not None:
        path.touch(mode)
        path.chmod(mode)
        path.write_text(content)
    await expect_raised(module.SidecarSearch({"endpoints": str(path)}), words)


async def test_no_endpoints_at_all(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is named."""
    monkeypatch.delenv(VARIABLE, raising=False)
    await expect_raised(module.SidecarSearch({}), VARIABLE)


async def test_no_proxy_is_asked(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a node exports for downloads must not see a search."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with beside(tmp_path, monkeypatch):
        assert await called(module.SidecarSearch({}), {"query": "Ada"}) == joined("Ada")


# --- the file -------------------------------------------------------------------------------------


@pytest.mark.process
def test_the_file_needs_nothing_but_the_standard_library() -> None:
    """It is read without verl and without this package; a tool is what needs verl."""
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('verl_search_tool', {str(FILE)!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "try:\n"
        "    module.SidecarSearch({})\n"
        "except ModuleNotFoundError as missing:\n"
        "    print(missing.name)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"]},
    )
    assert ended.stdout == "verl\n"


async def test_a_tool_can_travel(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is sent a tool gets one that works, with no failure of its sender's."""
    tool = module.SidecarSearch({"type": "native"})
    async with beside(tmp_path, monkeypatch):
        assert await called(tool, {"query": "Ada"}) == joined("Ada")
        again = pickle.loads(pickle.dumps(tool))  # noqa: S301 - ours
        assert await called(again, {"query": "Bob"}) == joined("Bob")
        module._FAILED.first = "here"
        assert pickle.loads(pickle.dumps(module._FAILED)).first is None  # noqa: S301 - ours
