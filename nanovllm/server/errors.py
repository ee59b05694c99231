"""Errors in the shape that OpenAI's clients understand, whatever raised them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields as fields_of
from itertools import takewhile
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from nanovllm.admission import NeverFits, QueueFull
from nanovllm.engine.request import ContextLengthExceeded
from nanovllm.sampling_params import SamplingParams
from nanovllm.stream import EngineDead, RequestAborted

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
PARAMETERS = {field.name for field in fields_of(SamplingParams)}


class ApiError(HTTPException):
    """An answer that is an error. `param` names the field that is wrong, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code = param, code


def error_body(error: HTTPException) -> dict[str, Any]:
    status = error.status_code
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    told: dict[str, str | None] = {"message": str(error.detail), "type": kind}
    told |= {"param": getattr(error, "param", None), "code": getattr(error, "code", None)}
    # A client's own words may have half a surrogate pair, which cannot be sent.
    return {"error": {name: value and value.encode(errors="replace").decode() for name, value in told.items()}}


def error_response(error: HTTPException) -> JSONResponse:
    return JSONResponse(error_body(error), error.status_code, dict(error.headers or {}))


@contextmanager
def answering() -> Iterator[None]:
    """Turn what the engine refuses or cannot do into an answer to the client."""
    try:
        yield
    except NeverFits as error:
        raise ApiError(400, str(error), param="n", code="too_many_sequences") from error
    except QueueFull as error:
        raise ApiError(429, str(error), code="queue_full", headers={"Retry-After": "1"}) from error
    except (EngineDead, RequestAborted) as error:  # whose messages are for the server's own log
        raise ApiError(503, "the engine is not running, or is being shut down", code="engine_stopped") from error


@contextmanager
def refusing(prompt: str) -> Iterator[None]:
    """Turn what prompts and parameters must not be into the client's mistake. `prompt`: the field with the prompt.

    Only for what checks them: a ValueError from anywhere else is a fault of the server.
    """
    try:
        yield
    except ContextLengthExceeded as error:
        raise ApiError(400, str(error), param=prompt, code="context_length_exceeded") from error
    except (ValueError, TypeError) as error:
        name = str(error).partition(" ")[0].partition("=")[0]  # a message begins with what it is about
        param = prompt if name.startswith("prompt") else name if name in PARAMETERS else None
        raise ApiError(400, str(error), param=param) from error


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
    elif kind == "refused":  # by the field's name
        fields, message = [*fields, first["ctx"]["field"]], first["ctx"]["what"]
    elif not path and kind != "value_error":
        message = "the body must be a JSON object, sent with Content-Type: application/json"
    elif kind == "extra_forbidden":
        message = "not supported here; leave it out"
    elif kind.endswith("_type") and len(fields) < len(path):
        message = "neither this type nor what is in it is accepted here"
    param = ".".join(map(str, fields)) or None
    return error_response(ApiError(400, f"{param}: {message}" if param else message, param=param))


def what_there_is(app: FastAPI) -> str:
    """The routes that are in the schema, for whoever asked for another."""
    paths = app.openapi()["paths"].items()
    routes = [f"{method.upper()} {path}" for path, methods in paths for method in methods]
    return f"here there is {', '.join(routes)}"


def install(app: FastAPI) -> None:
    """Give what is raised inside of a route its shape. What nobody foresaw is `Watch`'s."""

    def http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if error.status_code in (404, 405) and not isinstance(error, ApiError):
            error = ApiError(error.status_code, f"{error.detail}: {what_there_is(app)}", headers=error.headers)
        return error_response(error)

    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, bad_request)
