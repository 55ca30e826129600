"""Any bytes at the edge give a row of the table: never a traceback, a hang or a capability."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import tempfile
from pathlib import Path

import pytest
import uvloop
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.fakes.served import EXECUTE_CAPABILITY, INTERNAL_CAPABILITY, native_body, served
from tests.parity.wire import asking, message
from tests.web.rawclient import RawClient

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
ROWS: dict[int, set[str | None]] = {
    200: {None},
    400: {"invalid_body", "invalid_request", "bad_message", "operator_request"},
    401: {"unauthorized"},
    404: {"not_found"},
    405: {"method_not_allowed"},
    413: {"body_size"},
    415: {"content_type"},
}
CAUSES = {
    None,
    "http_bad_message",
    "http_not_found",
    "http_unauthorized",
    "http_method_not_allowed",
    "http_invalid_body",
    "http_body_size",
    "http_content_type",
    "http_invalid_request",
    "invalid_native_request",
    "response_undelivered",
    "operator",
}

methods = st.sampled_from(["POST", "GET", "PUT", "post", "P\u00f6ST", ""])
capabilities = st.sampled_from([EXECUTE_CAPABILITY, INTERNAL_CAPABILITY, "x" * 43, ""])
segments = st.sampled_from(["/execute", "/latch", "/health", "/", "", "/execute?x", "/%65xecute"])
targets = st.builds(lambda cap, segment: f"/{cap}{segment}", capabilities, segments) | st.text(
    st.characters(min_codepoint=33, max_codepoint=126), max_size=40
)
header_lines = st.lists(
    st.sampled_from(
        [
            "Content-Type: application/json",
            "Content-Type: text/plain",
            "Content-Length: 2",
            "Content-Length: +2",
            "Transfer-Encoding: chunked",
            "Content-Encoding: gzip",
            "Expect: 100-continue",
            "Connection: close",
            "Connection: upgrade",
            "X: \x00",
            " folded",
            "no colon",
        ]
    ),
    max_size=4,
)
bodies = (
    st.binary(max_size=60)
    | st.sampled_from([b"{}", b"[]", b'{"reason":"x"}'])
    | st.text(max_size=30).map(
        lambda query: json.dumps(native_body(query.encode("utf-8", "replace").decode())).encode()
    )
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Something between a good request and noise."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(min_size=1, max_size=200)) + b"\r\n\r\n"
    body = draw(bodies)
    lines = ["Host: x", *draw(header_lines)]
    if draw(st.booleans()):
        lines.append(f"Content-Length: {len(body)}")
    head = f"{draw(methods)} {draw(targets)} HTTP/1.1\r\n" + "\r\n".join(lines) + "\r\n\r\n"
    return head.encode("utf-8") + body


async def patiently(client: RawClient) -> bytes:
    loop = asyncio.get_running_loop()
    received = b""
    try:
        async with asyncio.timeout(0.2):
            while b"\r\n\r\n" not in received.replace(CONTINUE, b""):
                more = await loop.sock_recv(client.sock, 65536)
                if not more:
                    return received
                received += more
    except TimeoutError:
        pass
    except ConnectionError:
        return received
    with contextlib.suppress(OSError):
        client.sock.shutdown(socket.SHUT_WR)
    return received + await client.rest()


async def exchange(request: bytes, place: Path) -> None:
    with tempfile.TemporaryDirectory(dir=place) as folder:
        async with served(Path(folder) / "run", server__body_seconds=0.05) as run:
            client = await RawClient.connect(("127.0.0.1", run.port))
            await client.send(request)
            # A whole message is answered; after a cut one the edge waits until we half-close.
            received = await patiently(client)
            client.sock.close()
            assert EXECUTE_CAPABILITY.encode() not in received
            assert INTERNAL_CAPABILITY.encode() not in received
            received = received.replace(CONTINUE, b"")
            if received:
                head, _, rest = received.partition(b"\r\n\r\n")
                status = int(head.split()[1])
                assert status in ROWS
                assert b"Traceback" not in received
                if status != 200 and rest:  # a good answer may be the operator's page
                    value = json.JSONDecoder().raw_decode(rest.decode())[0]
                    assert value["error"]["code"] in ROWS[status]
            cause = run.service.run.state.cause
            assert (cause.cause if cause else None) in CAUSES
            assert run.service.run.state.settled
            assert await run.stop() == (4 if cause else 0)


@pytest.mark.may_block("a run directory is made and removed around each example")
@settings(
    max_examples=2 * settings().max_examples,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(request=requests())
# A request for each row, which chance may miss.
@example(request=asking("Ada"))
@example(request=message(b"{}"))
@example(request=message(b"{}", headers=("Content-Type: text/plain",)))
@example(request=message(b"{}", length="+2"))
@example(request=message(b"x" * 70_000))
@example(request=message(b"{}", method="PUT"))
@example(request=message(b"{}", target=f"/{EXECUTE_CAPABILITY}/other"))
@example(request=message(b"{}", target="/unknown/execute"))
@example(request=message(b'{"reason":"x"}', target=f"/{INTERNAL_CAPABILITY}/latch"))
@example(request=message(b"{}", target=f"/{INTERNAL_CAPABILITY}/latch"))
@example(request=message(b"", method="GET", target=f"/{INTERNAL_CAPABILITY}/health"))
@example(request=message(b"", method="GET", target="/livez"))
def test_any_bytes_give_a_row(
    request: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever arrives, the answer is a row of the table and the run's end fits its latch."""
    caplog.clear()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(exchange(request, tmp_path))
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert EXECUTE_CAPABILITY not in caplog.text
