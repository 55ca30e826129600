"""Requests that hold a capability of the run and are not served: each ends the run.

A rollout that is told 401, 404 or 405 writes that into its text and goes on, so the gate must know.
"""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest

from smartsearch_sidecar.process.daemon import Daemon
from smartsearch_sidecar.web.capabilities import Capabilities
from tests.fakes.process import running
from tests.fakes.provider import FakeProvider
from tests.fakes.served import (
    EXECUTE_CAPABILITY,
    INTERNAL_CAPABILITY,
    configured,
    native_body,
    served,
)
from tests.fakes.until import until
from tests.web.rawclient import RawClient

EXECUTE, INTERNAL = EXECUTE_CAPABILITY, INTERNAL_CAPABILITY
STRANGER = "x" * len(EXECUTE)
BODY = json.dumps(native_body("Ada")).encode()


def encoded(text: str, times: int = 1) -> str:
    """Each character as its percent-encoding, and that encoded again."""
    for _ in range(times):
        text = "".join(f"%{byte:02x}" for byte in text.encode())
    return text


def basic(word: str) -> str:
    return "Basic " + base64.b64encode(f"{word}:".encode()).decode()


def request(target: str, method: str = "POST", *headers: str, body: bytes = BODY) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


async def asked(port: int, data: bytes) -> tuple[int, bytes]:
    """The status of the answer, and all of its bytes."""
    client = await RawClient.connect(("127.0.0.1", port))
    await client.send(data)
    answer = await client.answer(bodiless=data.startswith(b"HEAD "))
    client.close()
    return answer.status, answer.raw


# Slashes mean nothing: a client joins the URL and its route in its own way.
SERVED = {
    "a slash at the end of sandbox_url": f"/{EXECUTE}//execute",
    "a slash at the end": f"/{EXECUTE}/execute/",
    "slashes everywhere": f"//{EXECUTE}///execute//",
    "a slash before": f"///{EXECUTE}/execute",
}


@pytest.mark.both_loops
@pytest.mark.parametrize("target", SERVED.values(), ids=SERVED)
async def test_slashes_are_normalised(tmp_path: Path, target: str) -> None:
    """A target with more slashes is the same route, and a search as any other."""
    async with served(tmp_path / "run") as run:
        assert (await asked(run.port, request(target)))[0] == 200
        status, health = await run.health()
        assert (status, health["retrieval_responses"]) == (200, 1)


async def test_slashes_of_the_trainer_are_normalised(tmp_path: Path) -> None:
    """The internal URL with a slash at its end reaches gate, rewards and page."""
    async with served(tmp_path / "run") as run:
        for path in (f"/{INTERNAL}//health", f"//{INTERNAL}/health/", f"//{INTERNAL}//"):
            assert (await asked(run.port, request(path, "GET", body=b"")))[0] == 200
        assert (await asked(run.port, request(f"/{INTERNAL}//reward")))[0] == 404
        assert (await run.health())[0] == 200


UNAUTHORIZED = (401, "http_unauthorized")
NOT_FOUND = (404, "http_not_found")
METHOD = (405, "http_method_not_allowed")
# What is sent, the status it is told, and the cause.
NOT_SERVED: dict[str, tuple[bytes, tuple[int, str]]] = {
    "upper case": (request(f"/{EXECUTE.upper()}/execute"), UNAUTHORIZED),
    "upper case of the route": (request(f"/{EXECUTE}/EXECUTE"), NOT_FOUND),
    "a letter encoded": (request(f"/%65{EXECUTE[1:]}/execute"), UNAUTHORIZED),
    "all encoded": (request(f"/{encoded(EXECUTE)}/execute"), UNAUTHORIZED),
    "encoded twice": (request(f"/{encoded(EXECUTE, 2)}/execute"), UNAUTHORIZED),
    "encoded thrice": (request(f"/{encoded(EXECUTE, 3)}/execute"), UNAUTHORIZED),
    "an encoded slash before": (request(f"/%2F{EXECUTE}/execute"), UNAUTHORIZED),
    "an encoded slash behind": (request(f"/{EXECUTE}%2Fexecute"), UNAUTHORIZED),
    "encoded in upper case": (request(f"/{encoded(EXECUTE.upper())}/execute"), UNAUTHORIZED),
    "the route encoded": (request(f"/{EXECUTE}/%65xecute"), NOT_FOUND),
    "absolute": (request(f"http://127.0.0.1/{EXECUTE}/execute"), UNAUTHORIZED),
    "absolute, of an odd host": (request(f"http://xn--a/{EXECUTE}/execute"), UNAUTHORIZED),
    "as a host": (request(f"http://{EXECUTE}/execute"), UNAUTHORIZED),
    "a folder before": (request(f"/api/{EXECUTE}/execute"), UNAUTHORIZED),
    "dots before": (request(f"/x/../{EXECUTE}/execute"), UNAUTHORIZED),
    "alone": (request(f"/{EXECUTE}"), UNAUTHORIZED),
    "alone, with a slash": (request(f"/{EXECUTE}/"), NOT_FOUND),
    "the route forgotten twice": (request(f"/{EXECUTE}/execute/execute"), UNAUTHORIZED),
    "no slash before the route": (request(f"/{EXECUTE}execute"), UNAUTHORIZED),
    "no slash behind a folder": (request(f"/v1{EXECUTE}/execute"), UNAUTHORIZED),
    "in a query": (request(f"/execute?token={EXECUTE}"), UNAUTHORIZED),
    "in a query of a probe": (request(f"/livez?{EXECUTE}", "GET", body=b""), UNAUTHORIZED),
    "with a query": (request(f"/{EXECUTE}/execute?x=1"), NOT_FOUND),
    "with a query before the route": (request(f"/{EXECUTE}?x/execute"), UNAUTHORIZED),
    "with a fragment": (request(f"/{EXECUTE}#/execute"), UNAUTHORIZED),
    "as a bearer": (
        request("/execute", "POST", f"Authorization: Bearer {EXECUTE}"),
        UNAUTHORIZED,
    ),
    "as a user": (request("/execute", "POST", f"Authorization: {basic(EXECUTE)}"), UNAUTHORIZED),
    "as a key": (request("/execute", "POST", f"X-Api-Key: {EXECUTE}"), UNAUTHORIZED),
    "as a proxy says it": (
        request("/execute", "POST", f"X-Forwarded-Prefix: /{EXECUTE}"),
        UNAUTHORIZED,
    ),
    "a header's host": (
        b"POST /execute HTTP/1.1\r\nHost: %b:80\r\nContent-Length: 0\r\n\r\n" % EXECUTE.encode(),
        UNAUTHORIZED,
    ),
    **{
        f"{method} of the route": (request(f"/{EXECUTE}/execute", method, body=b""), METHOD)
        for method in ("GET", "HEAD", "PUT", "OPTIONS", "DELETE", "PATCH")
    },
    "GET of sandbox_url": (request(f"/{EXECUTE}", "GET", body=b""), UNAUTHORIZED),
    "GET with a slash more": (request(f"/{EXECUTE}//execute", "GET", body=b""), METHOD),
    # The internal URL in the place of sandbox_url.
    "internal": (request(f"/{INTERNAL}/execute"), NOT_FOUND),
    "internal, a slash more": (request(f"/{INTERNAL}//execute"), NOT_FOUND),
    "internal, the route encoded": (request(f"/{INTERNAL}/%65xecute"), NOT_FOUND),
    "internal, GET": (request(f"/{INTERNAL}/execute", "GET", body=b""), NOT_FOUND),
    "internal, another client": (request(f"/{INTERNAL}/retrieve"), NOT_FOUND),
    "internal, alone": (request(f"/{INTERNAL}"), METHOD),
    "internal, upper case": (request(f"/{INTERNAL.upper()}/execute"), UNAUTHORIZED),
    "internal, encoded": (request(f"/{encoded(INTERNAL)}/reward"), UNAUTHORIZED),
    "internal, absolute": (request(f"http://h/{INTERNAL}/reward"), UNAUTHORIZED),
    # And the reverse.
    "execute as internal, health": (request(f"/{EXECUTE}/health", "GET", body=b""), METHOD),
    "execute as internal, reward": (request(f"/{EXECUTE}/reward"), NOT_FOUND),
    "execute as internal, batch": (request(f"/{EXECUTE}/reward/batch"), UNAUTHORIZED),
}


# A spelling is read the same on every loop; how such an answer leaves is tried on both for each
# status, method and kind of body.
ON_BOTH_LOOPS = (
    *("upper case", "all encoded", "absolute", "alone, with a slash", "a header's host"),
    *("in a query of a probe", "GET of the route", "HEAD of the route", "PUT of the route"),
    *("internal", "internal, alone", "internal, GET", "execute as internal, health"),
)


@pytest.mark.parametrize("name", [name for name in NOT_SERVED if name not in ON_BOTH_LOOPS])
async def test_what_holds_a_capability_and_is_not_served_closes_the_latch(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its caller is told what it always was, the run has failed, and no word shows the secret."""
    await ends_the_run(tmp_path, name, capfd)


@pytest.mark.both_loops
@pytest.mark.parametrize("name", ON_BOTH_LOOPS)
async def test_what_is_not_served_closes_the_latch_on_each_loop(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same of one spelling of each kind, on both event loops."""
    await ends_the_run(tmp_path, name, capfd)


async def ends_the_run(tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    data, (status, cause) = NOT_SERVED[name]
    async with served(tmp_path / "run") as run:
        told, raw = await asked(run.port, data)
        assert told == status
        _, health = await run.health()
        assert (health["state"], health["cause"]["cause"]) == ("failed", cause)
        assert health["refused"] == {cause: 1}
        assert (await run.internal("POST", "/checkpoints", {"step": 1}))[0] == 409
        assert await run.stop() == 4
    said = "".join(capfd.readouterr()) + json.dumps(health) + raw.decode()
    written = b"".join(
        path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()
    )
    for secret in (EXECUTE, INTERNAL):
        assert secret.lower() not in said.lower()
        assert secret.encode() not in written


TOUCHES_NOTHING: dict[str, bytes] = {
    "a stranger": request(f"/{STRANGER}/execute"),
    "all but a character": request(f"/{EXECUTE[:-1]}/execute"),
    "all but a character, encoded": request(f"/{encoded(EXECUTE[1:])}/execute"),
    "a character another": request(f"/{EXECUTE[:-1]}Y/execute"),
    "in two parts": request(f"/{EXECUTE[:20]}/{EXECUTE[20:]}/execute"),
    "a stranger's query": request(f"/execute?token={STRANGER}"),
    "a stranger's token": request("/execute", "POST", f"Authorization: Bearer {STRANGER}"),
    "a stranger's user": request("/execute", "POST", f"Authorization: {basic(STRANGER)}"),
    "no base64": request("/execute", "POST", "Authorization: Basic %%%"),
    "encodings without an end": request("/" + "%25" * 2000, "GET", body=b""),
    # A browser that shows the page asks for its icon, and may say from where.
    "an icon": request("/favicon.ico", "GET", f"Referer: http://127.0.0.1/{INTERNAL}/", body=b""),
    "a page that is not there": request(f"/{INTERNAL}/pages", "GET", body=b""),
    "a probe with a token": request("/livez", "GET", f"Authorization: Bearer {EXECUTE}", body=b""),
}


@pytest.mark.parametrize("name", TOUCHES_NOTHING)
async def test_strangers_and_operators_slips_close_nothing(tmp_path: Path, name: str) -> None:
    """A request without a capability, and a person's slip, leave the run as it was."""
    async with served(tmp_path / "run") as run:
        status, _ = await asked(run.port, TOUCHES_NOTHING[name])
        assert status in (200, 401, 404)
        assert (await run.health())[0] == 200
        assert [record["kind"] for record in run.records()] == ["run.claimed"]
        assert await run.stop() == 0


async def test_a_rollout_at_the_listener_of_the_probes_closes_the_latch(tmp_path: Path) -> None:
    """The wrong port of the two answers no search, so what asks there has failed."""
    keys: dict[str, Any] = {"server__probe_host": "127.0.0.1", "server__probe_port": 0}
    async with served(tmp_path / "run", **keys) as run:
        port = run.daemon.probe_port
        assert port is not None
        assert (await asked(port, request(f"/{STRANGER}/execute")))[0] == 401
        assert (await run.health())[0] == 200
        assert (await asked(port, request(f"/{EXECUTE}/execute")))[0] == 401
        _, health = await run.health()
        assert health["cause"]["cause"] == "http_unauthorized"


@pytest.mark.process
def test_rollouts_with_another_url_end_a_real_run(tmp_path: Path) -> None:
    """The internal URL as sandbox_url: each rollout is told 404, and the checkpoint is refused."""

    async def ask(internal_url: str) -> int:
        host, path = internal_url.removeprefix("http://").split("/")
        data = request(f"/{path}/execute")
        return (await asked(int(host.partition(":")[2]), data))[0]

    with running(tmp_path) as daemon:
        url = str(daemon.endpoints()["internal_url"])
        assert asyncio.run(ask(url)) == 404
        assert daemon.internal().health().value["cause"]["cause"] == "http_not_found"
        assert daemon.stop() == 4
        assert url.rpartition("/")[2] not in daemon.log.read_text()


async def test_what_comes_while_the_index_loads_is_kept(tmp_path: Path) -> None:
    """A misspelled request before the run is claimed closes its latch as soon as there is one."""
    opened = asyncio.Event()

    class SlowToOpen(FakeProvider):
        async def identity(self) -> Any:
            await opened.wait()
            return await super().identity()

    daemon = Daemon(configured(tmp_path / "run"), provider=SlowToOpen())
    task = asyncio.create_task(daemon.run())
    await until(lambda: daemon.port is not None)
    assert daemon.port is not None
    assert (await asked(daemon.port, request(f"/{EXECUTE.upper()}/execute")))[0] == 401
    opened.set()
    await until(lambda: (tmp_path / "run" / "latch.json").exists() or task.done())
    daemon.stop()
    assert await task == 4


def test_reading_a_hostile_request_takes_no_time() -> None:
    """What a stranger sends is read in time that grows with its length alone."""
    capabilities = Capabilities(EXECUTE, INTERNAL)
    for unit in ("%25", "a", "a" * 31 + "/", "a" * 127 + "/", "%2525", "/", "-" * 33 + "."):
        text = unit * (8000 // len(unit))
        assert not capabilities.carried(text, {"X": text})
        assert capabilities.shown((text * 30).encode()) == (False, False)
