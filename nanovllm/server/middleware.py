"""What every request passes: `Watch` gives an id, counts and logs; `Guard` checks who may ask, and reads the body."""

import asyncio
import json
import logging
import re
import time
from collections.abc import Collection, Sequence
from hashlib import sha256
from secrets import compare_digest
from urllib.parse import urlsplit
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.server.errors import ApiError, error_response
from nanovllm.server.interface import Meters
from nanovllm.server.json_size import num_values
from nanovllm.server.options import AppOptions, is_loopback

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("nanovllm.access")

OPEN_PATHS = {"/health", "/ping", "/"}  # for probes without a key, and a page that has nothing in it
METHODS = {"GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "PATCH"}
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")  # nothing that could forge a line of the log
CLIENT_GONE = 499  # nginx's number for a client that left before its answer
CLOSE = {"Connection": "close"}
# Reading the JSON of a large body holds up the event loop. So after BREAK_AFTER bytes of large bodies there is a break
# for other clients, and for the pulse. And the values of a large body are counted first: with one per so many bytes of
# the largest body of 4 MiB, reading takes less than BREAK, but a list of a million lists would take seconds.
LARGE, BREAK_AFTER = 2**14, 2**18  # bytes
BREAK = 0.05  # seconds
PER_VALUE = 2**7  # bytes, for a string, a list or an object
PER_NUMBER = 2**3


class Watch:
    """Gives each request an id, counts its answer by status, and writes the access log.

    The id is the client's `X-Request-Id`, if that is a plain word. The answer repeats the id. The access log has no
    queries and no bodies. An unexpected exception becomes a 500, with a traceback in the log under the same id.
    """

    def __init__(self, app: ASGIApp, meters: Meters, paths: Collection[str], access_log: bool) -> None:
        """`paths`: the paths that have counters of their own, beside the routes with parameters."""
        self.app, self.meters, self.paths, self.access_log = app, meters, paths, access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id)]
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except Exception:
            if status:  # too late for an answer: the web server closes the connection, and logs why
                raise
            logger.exception("request %s met an internal error", request_id.decode())
            error = ApiError(500, "internal error; the server's log has its traceback under this X-Request-Id")
            await error_response(error)(scope, receive, noted)
        finally:
            self._note(scope, status or CLIENT_GONE, time.perf_counter() - began, request_id.decode())

    def _note(self, scope: Scope, status: int, seconds: float, request_id: str) -> None:
        path = path_of(scope)
        route = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if scope["method"] in METHODS else "other"
        self.meters.count("http_requests", path if path in self.paths else route, method, str(status))
        if self.access_log:
            probe = path in OPEN_PATHS and status == 200  # of which there is one every few seconds
            client = (scope.get("client") or ["-"])[0]
            shown = scope.get("raw_path", b"").decode("latin-1")[:200]  # percent-encoded still
            level = logging.DEBUG if probe else logging.INFO
            access_logger.log(level, '%s "%s %s" %d %.3fs %s', client, method, shown, status, seconds, request_id)


class Guard:
    """Checks, before a route sees a request, what does not depend on the meaning of the request.

    Answers 400 if a request gives the length of its body in two ways, which is how requests are smuggled past a proxy;
    401 without a key; 403 for a host name that is not this server's; 408 for a body that does not arrive in time; 413
    for a body of more than `max_body_bytes`, announced or not, and for a body with too many values. With
    `isolate_keys`, each key has a salt of its own.

    Large bodies that are complete at the same time are handed on one after the other, with breaks.
    """

    def __init__(self, app: ASGIApp, options: AppOptions) -> None:
        self.app, self.options = app, options
        self.keys = [sha256(key.encode()).digest() for key in options.api_keys]
        self._num_handed_on = 0  # bytes of large bodies, since the last break
        self._loop: asyncio.AbstractEventLoop | None = None  # which ends the break

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self._admit(scope)
            body = await self._read(scope, receive)
            if body is None:  # the client is gone
                return
            if len(body) > LARGE:
                await self._wait_for_turn(len(body))
                check_values(body, self.options.max_body_bytes)
                await asyncio.sleep(0)  # another turn, as counting takes some milliseconds
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return unread.pop() if unread else await receive()

        await self.app(scope, replay, send)

    def _admit(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if self.options.allowed_hosts is not None and not is_allowed_host(host, self.options.allowed_hosts):
            message = f"this server does not answer to the name {host[:100]!r}; start it with --allowed-hosts {host}"
            raise ApiError(403, message[:300], code="host_not_allowed")
        if self.keys and path_of(scope) not in OPEN_PATHS:
            scope.setdefault("state", {})["salt"] = self._check_key(headers.get(b"authorization", b""))
        if b"content-length" in headers and b"transfer-encoding" in headers:
            raise ApiError(400, "Content-Length and Transfer-Encoding exclude each other; send one", headers=CLOSE)

    def _check_key(self, authorization: bytes) -> str | None:
        """The salt of the key's owner, if keys are isolated."""
        scheme, _, key = authorization.partition(b" ")  # the scheme's case does not matter: RFC 9110
        digest = sha256(key.strip()).digest()
        matches = [compare_digest(digest, known) for known in self.keys]  # all of them, so that the time tells nothing
        if scheme.lower() != b"bearer" or not any(matches):
            message = "no or a wrong API key; send 'Authorization: Bearer KEY'"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return digest.hex() if self.options.isolate_keys else None

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None if the client left before its end."""
        limit = self.options.max_body_bytes
        too_large = ApiError(413, f"the body has more than {limit} bytes", code="body_too_large")
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced[:20]) > limit:
            raise too_large
        parts, num_bytes, more = [], 0, True
        try:
            async with asyncio.timeout(self.options.receive_timeout):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    num_bytes += len(parts[-1])
                    if num_bytes > limit:
                        raise too_large
                    more = message.get("more_body", False)
        except TimeoutError:
            late = f"the body did not come within {self.options.receive_timeout:g} s"
            raise ApiError(408, late, code="body_timeout", headers=CLOSE) from None
        return b"".join(parts)

    async def _wait_for_turn(self, num_bytes: int) -> None:
        """Wait until there is time to read a large body."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # a test client has one for each request, and the last one ends no break any more
            self._loop, self._num_handed_on = loop, 0
        while self._num_handed_on >= BREAK_AFTER:
            await asyncio.sleep(BREAK)
        if not self._num_handed_on:
            loop.call_soon(loop.call_later, BREAK, self._end_break)  # soon: when what is handed on now has been read
        self._num_handed_on += num_bytes

    def _end_break(self) -> None:
        self._num_handed_on = 0


def check_values(body: bytes, max_body_bytes: int) -> None:
    """Raise ApiError if JSON has more values than can be read in a short time."""
    values, commas = num_values(body.decode(json.detect_encoding(body), errors="replace"))
    for number, bytes_each, what in (values, PER_VALUE, "strings, lists and objects"), (commas, PER_NUMBER, "values"):
        if number > (most := max_body_bytes // bytes_each):
            message = f"the body has {number} {what}, and at most {most} are possible"
            remedy = "send fewer messages, parts of messages, tools or token ids"
            raise ApiError(413, f"{message}; {remedy}", code="body_too_large")


def path_of(scope: Scope) -> str:
    """The path as the routes know it, without the prefix of a proxy in front."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def is_allowed_host(host: str, allowed: Sequence[str]) -> bool:
    """Whether a Host header names this server. "loopback" stands for every loopback address, "*" for any name."""
    if "*" in allowed:
        return True
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name in allowed or ("loopback" in allowed and is_loopback(name))
