"""The one bounded HTTP client, against a server that writes the very bytes of each answer.

What its failures mean to a search and to a helper call is tested with the retriever's and the
helper's clients; here is what both lean on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from smartsearch_sidecar import errors
from smartsearch_sidecar.outbound_http import (
    ExchangeFailed,
    ExchangeFault,
    HttpAnswer,
    OutboundHttp,
)

HEAD = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + "Transfer-Encoding: chunked\r\n\r\n"


class Server:
    """Answers each request with the same bytes, and keeps what was asked."""

    def __init__(self, answer: str, *, hang: bool = False) -> None:
        self.asked: list[str] = []
        self.connections = 0
        self._answer = answer
        self._hang = hang

    @asynccontextmanager
    async def url(self) -> AsyncIterator[str]:
        """Its address while it serves."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                length = [line for line in head.split("\r\n") if line.startswith("Content-Length")]
                await reader.readexactly(int(length[0].partition(":")[2]) if length else 0)
                self.asked.append(head)
                writer.write(self._answer.encode())
                await writer.drain()
                if self._hang:
                    await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def opened() -> AsyncIterator[OutboundHttp]:
    """A client that is open, and closed afterwards."""
    client = OutboundHttp(connections_max=2, keepalive_seconds=1.0, connect_seconds=None)
    try:
        yield client
    finally:
        await client.close()


async def ask(
    client: OutboundHttp, url: str, *, seconds: float = 20.0, json_only: bool = False
) -> HttpAnswer:
    """One exchange with a bound of 100 bytes."""
    until = asyncio.get_running_loop().time() + seconds
    return await client.exchange(
        "POST", f"{url}/ask", b"{}", until=until, bytes_max=100, json_only=json_only
    )


def sized(body: str, head: str = HEAD) -> str:
    """An answer with its length."""
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}"


async def test_an_answer_comes_with_status_media_and_body() -> None:
    """A body up to the bound is whole, and the next request finds the connection open."""
    server = Server(sized("x" * 100))
    async with server.url() as url, opened() as client:
        for _ in range(2):
            assert await ask(client, url) == HttpAnswer(200, "application/json", b"x" * 100)
    assert server.connections == 1


async def test_a_redirect_is_not_followed_and_a_cookie_not_kept() -> None:
    """A prompt holds answers: it goes where the operator said and nowhere else."""
    server = Server(
        "HTTP/1.1 307 Elsewhere\r\nLocation: /trap\r\nSet-Cookie: a=b\r\nContent-Length: 0\r\n\r\n"
    )
    async with server.url() as url, opened() as client:
        for _ in range(2):
            assert await ask(client, url) == HttpAnswer(307)
    assert [head.split(" ")[1] for head in server.asked] == ["/ask", "/ask"]
    assert not any("cookie" in head.lower() for head in server.asked)


async def test_the_body_of_another_status_is_not_read() -> None:
    """An error page has no bound, so it is left where it is."""
    server = Server("HTTP/1.1 500 Broken\r\nContent-Length: 1000000\r\n\r\n", hang=True)
    async with server.url() as url, opened() as client:
        assert await ask(client, url) == HttpAnswer(500)


@pytest.mark.parametrize(
    ("answer", "hang", "failure", "answered"),
    [
        (sized("x" * 101), False, ExchangeFault.TOO_LONG, True),
        (
            HEAD + "Transfer-Encoding: chunked\r\n\r\n65\r\n" + "x" * 101,
            True,
            ExchangeFault.TOO_LONG,
            True,
        ),
        (sized("{}", HEAD + "Content-Encoding: gzip\r\n"), False, ExchangeFault.COMPRESSED, True),
        (
            sized("<", "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n"),
            False,
            ExchangeFault.OTHER_MEDIA,
            True,
        ),
        ("SSH-2.0-none\r\n\r\n", False, ExchangeFault.NOT_HTTP, False),
        (HEAD + "Content-Length: 50\r\n\r\nxx", True, ExchangeFault.LATE, True),
        ("", True, ExchangeFault.LATE, False),
    ],
)
async def test_what_is_no_usable_answer_is_named(
    answer: str, hang: bool, failure: ExchangeFault, answered: bool
) -> None:
    """Each failure has one name, and says that the request was sent and whether an answer began."""
    server = Server(answer, hang=hang)
    seconds = 0.3 if failure is ExchangeFault.LATE else 20.0
    async with server.url() as url, opened() as client:
        with pytest.raises(ExchangeFailed) as caught:
            await ask(client, url, seconds=seconds, json_only=True)
    assert (caught.value.failure, caught.value.sent) == (failure, True)
    assert caught.value.answered is answered
    assert len(server.asked) == 1


async def test_a_missing_media_type_is_not_another_one() -> None:
    """A server that does not say what it sends is read."""
    server = Server(sized("{}", "HTTP/1.1 200 OK\r\n"))
    async with server.url() as url, opened() as client:
        assert (await ask(client, url, json_only=True)).body == b"{}"


async def test_nothing_was_sent_where_no_connection_was_had() -> None:
    """Only then may a caller send the same request again."""
    async with Server("").url() as url:
        pass
    async with opened() as client:
        with pytest.raises(ExchangeFailed) as caught:
            await ask(client, url)
    assert caught.value.failure is ExchangeFault.NO_CONNECTION
    assert (caught.value.sent, caught.value.answered) == (False, False)


async def test_a_pool_is_made_once_and_closed_for_good() -> None:
    """A request after the end is a mistake of ours, and says so."""
    client = OutboundHttp(connections_max=1, keepalive_seconds=1.0, connect_seconds=None)
    assert client.pool() is client.pool()
    await client.close()
    with pytest.raises(errors.InvariantBroken):
        await ask(client, "http://127.0.0.1:9")
    with pytest.raises(errors.InvariantBroken):
        client.pool()
