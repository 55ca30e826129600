"""Exactly these bytes on a new connection, and what came back: from either service alike."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.fakes.served import EXECUTE_CAPABILITY, native_body
from tests.web.rawclient import RawClient

CAPABILITY = EXECUTE_CAPABILITY
TARGET = f"/{CAPABILITY}/execute"
JSON_TYPE = "Content-Type: application/json"


@dataclass(frozen=True)
class Said:
    """One answer. ``status`` is ``None`` where the connection ended without a status line;
    ``value`` is the parsed body where it is declared and valid JSON; ``headers`` in lower case.
    """

    status: int | None
    headers: dict[str, str]
    value: Any

    @property
    def code(self) -> str | None:
        """``error.code``."""
        error = self.value.get("error") if isinstance(self.value, dict) else None
        return str(error["code"]) if isinstance(error, dict) else None


NOTHING = Said(None, {}, None)


def message(
    body: bytes,
    *,
    method: str = "POST",
    target: str = TARGET,
    version: str = "HTTP/1.1",
    headers: tuple[str, ...] = (JSON_TYPE,),
    length: str | None = "",
) -> bytes:
    """A request; ``length`` replaces the Content-Length of the body, ``None`` leaves it out."""
    lines = [f"{method} {target} {version}", "Host: x", *headers]
    if length is not None:
        lines.append(f"Content-Length: {length or len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def asking(query: str) -> bytes:
    """What the pinned rollout sends for a query."""
    return message(json.dumps(native_body(query)).encode())


async def exchange(port: int, data: bytes, *, half_close: bool = False) -> Said:
    """Sends ``data`` and returns the first answer."""
    client = await RawClient.connect(("127.0.0.1", port))
    try:
        await client.send(data)
        if half_close:
            client.shut()
        return await read_answer(client, bodiless=data.startswith(b"HEAD "))
    finally:
        client.close()


async def read_answer(client: RawClient, *, bodiless: bool = False) -> Said:
    """The next answer of a connection; an interim one is not it."""
    while True:
        while b"\r\n\r\n" not in client.received:
            if not await client._more():
                return NOTHING
        head, _, rest = client.received.partition(b"\r\n\r\n")
        line, *lines = head.decode("latin-1").split("\r\n")
        status = int(line.split(" ")[1])
        if status != 100:
            break
        client.received = rest
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    length = 0 if bodiless else int(headers.get("content-length", "0"))
    while len(rest) < length and await client._more():
        rest = client.received[len(head) + 4 :]
    client.received = rest[length:]
    return Said(status, headers, _parsed(headers, rest[:length]))


def _parsed(headers: dict[str, str], body: bytes) -> Any:
    if headers.get("content-type") != "application/json":
        return None
    try:
        return json.loads(body)
    except ValueError:  # cut short: the answer never came whole
        return None
