"""Errors in the shape that OpenAI's clients understand, whatever raised them."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from nanovllm.stream import EngineDead, QueueFull, RequestAborted

TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}


class ApiError(HTTPException):
    """An answer that is an error. `param` names the field that is wrong, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code = param, code


def error_body(error: HTTPException) -> dict[str, Any]:
    status = error.status_code
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    details = {"param": getattr(error, "param", None), "code": getattr(error, "code", None)}
    return {"error": {"message": str(error.detail), "type": kind} | details}


def error_response(error: HTTPException) -> JSONResponse:
    return JSONResponse(error_body(error), error.status_code, dict(error.headers or {}))


@contextmanager
def answering() -> Iterator[None]:
    """Turn what the engine refuses or cannot do into an answer to the client."""
    try:
        yield
    except QueueFull as error:
        raise ApiError(429, str(error), code="queue_full", headers={"Retry-After": "1"}) from error
    except (EngineDead, RequestAborted) as error:  # whose messages are for the server's own log
        raise ApiError(503, "the engine is not running, or is being shut down", code="engine_stopped") from error


@contextmanager
def refusing() -> Iterator[None]:
    """As `answering`; prompts and parameters that make no sense become the client's mistake, too."""
    try:
        with answering():
            yield
    except (ValueError, TypeError) as error:
        raise ApiError(400, str(error)) from error


def bad_request(request: Request, error: Exception) -> JSONResponse:
    """Name one thing that is wrong with a body, without repeating the body."""
    assert isinstance(error, RequestValidationError)
    # Where a field may have several types each has its complaint; the one about more than the type tells most.
    first = min(error.errors(), key=lambda e: e["type"].endswith("_type"))
    kind, message = first["type"], first["msg"].removeprefix("Value error, ")
    path = first["loc"][1:]  # without "body"
    # Behind the fields there may be what pydantic calls the type that it tried last.
    fields = list(takewhile(lambda part: isinstance(part, int) or (part.isidentifier() and part != "str"), path))
    if kind == "json_invalid":
        fields, message = [], "the body is not valid JSON"
    elif not path and kind != "value_error":
        message = "the body must be a JSON object, sent with Content-Type: application/json"
    elif kind == "extra_forbidden":
        message = "not supported here; leave it out"
    elif kind.endswith("_type") and len(fields) < len(path):
        message = "neither this type nor what is in it is accepted here"
    param = ".".join(map(str, fields)) or None
    return error_response(ApiError(400, f"{param}: {message}" if param else message, param=param))


def install(app: FastAPI) -> None:
    def http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return error_response(error)

    def bug(request: Request, error: Exception) -> JSONResponse:
        return error_response(ApiError(500, "internal error; the server's log has its traceback"))

    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, bad_request)
    app.add_exception_handler(Exception, bug)
