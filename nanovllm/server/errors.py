"""Errors in the shape that OpenAI's clients understand, whatever raised them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields as fields_of
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from nanovllm.admission import NeverFits, QueueFull
from nanovllm.engine.request import ContextLengthExceeded
from nanovllm.sampling_params import SamplingParams
from nanovllm.stream import EngineDead, RequestAborted
from nanovllm.structured_outputs import KINDS

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
PARAMETERS = {field.name for field in fields_of(SamplingParams)}
MEDIA = re.compile("image|audio|video|file|document")  # in the type of a part of a message
UNREADABLE = "the body cannot be read as JSON: it is compressed, not in Unicode, too deep, or has too long a number"


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
def refusing(prompt: str, structure: str = "") -> Iterator[None]:
    """Turn what prompts and parameters must not be into the client's mistake.

    prompt:     the field with the prompt.
    structure:  the field that became the structured outputs; "" if there is none.

    Only for what checks them: a ValueError from anywhere else is a fault of the server.
    """
    try:
        yield
    except ContextLengthExceeded as error:
        raise ApiError(400, str(error), param=prompt, code="context_length_exceeded") from error
    except (ValueError, TypeError) as error:
        message = str(error).replace("prompt_token_ids", prompt)
        if structure:
            message = re.sub(rf"^structured_outputs\.({'|'.join(KINDS)})\b", structure, message)
        name = re.split(r"[^\w.]", message, maxsplit=1)[0]  # a message begins with what it is about
        is_field = name == structure or name.partition(".")[0] in PARAMETERS
        raise ApiError(400, message, param=name if is_field else prompt if name == prompt else None) from error


def bad_request(request: Request, error: Exception) -> JSONResponse:
    """Name one thing that is wrong with a body, without repeating the body."""
    assert isinstance(error, RequestValidationError)

    # Where a field may have several types each has its complaint. The one about more than the type tells most, and then
    # the one about what is deepest in the body.
    def rank(one: Mapping[str, Any]) -> tuple[bool, int]:
        return one["type"].endswith("_type"), -len(one["loc"])

    complaints = error.errors()
    first = min(complaints, key=rank)
    kind, message = first["type"], first["msg"].removeprefix("Value error, ")
    path, more = first["loc"][1:], first.get("ctx", {})  # without "body"
    fields = in_body(path, error.body)
    if kind == "json_invalid":
        fields, message = [], "the body is not valid JSON"
    elif kind == "refused":  # by the field's name
        fields, message = [*fields, more["field"]], more["what"]
    elif not path and kind != "value_error":
        message = "the body must be a JSON object, sent with Content-Type: application/json"
    elif kind == "missing":
        fields = [*fields, path[-1]] if fields[-1:] != [path[-1]] else fields  # a null is missing, too
    elif kind == "extra_forbidden":
        message = "not supported here; leave it out"
    elif kind == "too_long":
        message = f"has a length of {more['actual_length']}; at most {more['max_length']} is possible"
    elif kind == "too_short":
        message = f"must not be empty: its length must be at least {more['min_length']}"
    elif kind in ("model_type", "model_attributes_type"):
        message = "must be an object"
    elif fields == [*path[:-1]]:  # a value that may have several types: say what each type asks for
        same = [one["msg"] for one in complaints if rank(one) == rank(first) and one["loc"][1:-1] == path[:-1]]
        message = ", or ".join(
            [message, *(other.removeprefix("Input should be ") for other in same if other != message)]
        )
    elif kind.endswith("_type") and len(fields) < len(path):
        message = "neither this type nor what is in it is accepted here"
    elif kind == "literal_error" and fields[-1] == "type" and MEDIA.search(str(first["input"])):
        message += ": this server reads no images, sounds or files"
    param = ".".join(map(str, fields)) or None
    return error_response(ApiError(400, f"{param}: {message}" if param else message, param=param))


def in_body(path: Sequence[str | int], body: Any) -> list[str | int]:
    """What a client finds in its body of pydantic's path to a mistake. The rest are names of pydantic's own: of the
    types that it has tried."""
    found: list[str | int] = []
    for part in path:
        if isinstance(body, dict) and str(part) in body:
            body = body[str(part)]
        elif isinstance(body, list) and isinstance(part, int):
            body = body[part]
        else:
            continue
        found.append(part)
    return found


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
        elif error.status_code == 400 and not isinstance(error, ApiError):  # FastAPI's, which says less
            error = ApiError(400, UNREADABLE)
        return error_response(error)

    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, bad_request)
