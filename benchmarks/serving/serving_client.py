"""One client of the load test: a request over a bare socket, timed where its first and last tokens come in.

No HTTP library in between, so that hundreds of them fit in the process that makes the load.
"""

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any, Literal

Behaviour = Literal["served", "vanishes", "malformed"]


@dataclass
class Record:
    """What became of a request. Times are in seconds from when it was due, so that a late client counts as waiting."""

    behaviour: Behaviour
    status: int = 0  # of HTTP; 0 if there was no answer
    num_tokens: int = 0
    first_token: float | None = None
    last_token: float | None = None
    finished: bool = False

    @property
    def token_time(self) -> float | None:
        """Seconds a token after the first."""
        if self.first_token is None or self.last_token is None or self.num_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.num_tokens - 1)


def encode(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def request(port: int, behaviour: Behaviour, body: dict[str, Any], due: float, leave_after: int) -> Record:
    """Send a streaming completion and read it; `leave_after` so many tokens, if it is one that vanishes.

    due: when it should have been sent, in seconds of `time.perf_counter()`.
    """
    record = Record(behaviour)
    content = json.dumps(body).encode()
    if behaviour == "malformed":
        content = content[: len(content) // 2]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(encode("/v1/completions", content))
        record.status = int((await reader.readuntil(b" ") and await reader.readuntil(b" ")).strip() or 0)
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            now = time.perf_counter() - due
            for choice in chunk.get("choices", []):
                record.num_tokens += 1  # about: a chunk is a token or, for a slow reader or a split character, some
                record.first_token = now if record.first_token is None else record.first_token
                record.last_token = now
                record.finished = choice["finish_reason"] is not None
            if chunk.get("usage"):
                record.num_tokens = chunk["usage"]["completion_tokens"]
            if behaviour == "vanishes" and record.num_tokens >= leave_after:
                break
    finally:
        writer.transport.abort()
    return record


async def leave_at_once(port: int, body: dict[str, Any]) -> Record:
    """Gone before the first token."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(encode("/v1/completions", json.dumps(body).encode()))
    await writer.drain()
    await asyncio.sleep(0.01)
    writer.transport.abort()
    return Record("vanishes")
