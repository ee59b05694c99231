"""Limits on connections: a time within which each request must arrive, and a number of connections at once.

uvicorn has no time-out for silent connections and half requests, and lets them use up all file descriptors.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanovllm.server.errors import ApiError, error_body

logger = logging.getLogger(__name__)

BACKLOG = 2048  # connections that the system keeps until they are accepted
SPARE = 64  # file descriptors for everything that is no connection
# Seconds that a connection stays open between two requests. A client that sends a request just when the server closes
# gets no answer. So this is longer than most clients and proxies keep a connection: then they close it.
KEEP_ALIVE = 75


class Doors:
    """The connections of a server whose next request has not arrived completely, the longest wait first.

    receive_timeout:  seconds for the head of a request, and then as many for its body.
    max_connections:  beyond this number, the connection that has waited longest is closed for the new one. If all are
                      being served, the new one is refused.
    refused:          called with the reason for each connection that is closed or refused.
    """

    def __init__(self, receive_timeout: float, max_connections: int, refused: Callable[[str], None]) -> None:
        self.receive_timeout, self.max_connections, self.refused = receive_timeout, max_connections, refused
        self.waiting: dict[Connection, None] = {}

    def protocol(self) -> "type[Connection]":
        """The class of connections for uvicorn, which makes one object per connection."""
        return type("Connection", (Connection,), {"doors": self})


class Connection(H11Protocol):
    """One connection, with a clock for the head of each request and then for its body.

    The clock for the head starts at the first byte of a request; for the first request, when the connection is made.
    The clock for the body runs until the body has arrived, even if the body is thrown away.
    """

    doors: Doors

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._clock: asyncio.TimerHandle | None = None
        self._stage: Any = None  # the state of the request that the clock runs for
        self._turned_away = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        doors = self.doors
        doors.waiting[self] = None
        self._run_clock(h11.IDLE)
        if len(self.connections) > doors.max_connections:
            oldest = next(iter(doors.waiting))
            doors.refused("full" if oldest is self else "made_room")
            if oldest is not self:
                oldest.leave()
                oldest.transport.close()
            elif len(self.connections) > doors.max_connections + SPARE // 2:
                transport.close()
            else:  # closed only after it has sent something: otherwise the client might see a reset, and no answer
                self.leave()
                self._turned_away = True
                self._run_clock(h11.IDLE)
                busy = ApiError(503, "too many connections are open; try again later", headers={"Retry-After": "1"})
                transport.write(last_words(busy))

    def data_received(self, data: bytes) -> None:
        if self._turned_away:
            self.transport.close()
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self.leave()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close the connection without waiting for a request that has not arrived completely."""
        if self in self.doors.waiting and self.cycle is not None and not self.cycle.response_started:
            self.transport.close()
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        self.doors.refused("malformed")
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(last_words(ApiError(400, "this is no valid HTTP request")))
        self.transport.close()

    def leave(self) -> None:
        self._run_clock(None)
        self.doors.waiting.pop(self, None)

    def _watch(self) -> None:
        """Follow what the client has sent."""
        state = self.conn.their_state
        if state is h11.IDLE and self.timeout_keep_alive_task is not None:
            self._run_clock(None)  # nothing of the next request has arrived
        elif state is not self._stage or self._clock is None:
            self._run_clock(state if state in (h11.IDLE, h11.SEND_BODY) else None)
        if state in (h11.IDLE, h11.SEND_BODY):
            self.doors.waiting.setdefault(self)
        else:
            self.doors.waiting.pop(self, None)

    def _run_clock(self, stage: Any) -> None:
        if self._clock is not None:
            self._clock.cancel()
        self._clock, self._stage = None, stage
        if stage is not None:
            self._clock = self.loop.call_later(self.doors.receive_timeout, self._time_is_up)

    def _time_is_up(self) -> None:
        if self.transport.is_closing() or (self._stage is h11.SEND_BODY and not self.cycle.response_complete):
            return  # `Guard` answers the latter
        if self._stage is h11.IDLE and self.conn.trailing_data[0]:
            self.transport.write(last_words(ApiError(408, "the head of the request did not come in time")))
        if not self._turned_away:
            self.doors.refused("head_timeout" if self._stage is h11.IDLE else "body_timeout")
        self.transport.close()


def last_words(error: ApiError) -> bytes:
    """The bytes of an answer on a connection that is closed after it, where there is no complete request."""
    status, body = error.status_code, json.dumps(error_body(error)).encode()
    headers = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close"}
    lines = [f"{name}: {value}" for name, value in {**headers, **(error.headers or {})}.items()]
    return "\r\n".join([f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *lines, "\r\n"]).encode() + body


def most_connections(wanted: int) -> tuple[int, int]:
    """How many connections the file descriptors of this process allow, up to `wanted`, and how many may queue.

    Raises the limit of the process as far as the system permits. Connections are accepted in bunches as large as the
    queue before anybody can count them. So the bunches need descriptors, too.
    """
    try:
        import resource
    except ImportError:  # Windows
        return wanted, BACKLOG
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = wanted + BACKLOG + SPARE
    if soft != resource.RLIM_INFINITY and soft < enough:
        soft = enough if hard == resource.RLIM_INFINITY else min(hard, enough)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= enough:
        return wanted, BACKLOG
    backlog = min(BACKLOG, soft // 4)
    number = max(1, min(wanted, soft - backlog - SPARE))
    if number < wanted:
        logger.warning("max_connections=%d: this process may open %d files, so it is %d", wanted, soft, number)
    return number, backlog


def uvicorn_config(app: Any, options: Any, refused: Callable[[str], None]) -> uvicorn.Config:
    """uvicorn's configuration for the application. `options`: those of the command line, as `settle` leaves them."""
    number, backlog = most_connections(options.max_connections)
    return uvicorn.Config(
        app,
        http=Doors(options.receive_timeout, number, refused).protocol(),
        ws="none",
        backlog=backlog,
        root_path=options.root_path,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        proxy_headers=False,  # anybody could send them
        server_header=False,
        log_config=None,
        log_level=None,  # as `logs.set_up` says
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=options.drain_timeout + 5,
    )
