"""Instructor, which only ever asks for structures, in several ways."""

from collections.abc import Iterable
from typing import Any, Literal

import instructor
import openai
from calls.shared import ENOUGH, FEW, MESSAGES, Server, check_person, check_text
from pydantic import BaseModel

ALWAYS = "asks for structured outputs only"
LACKS = {"stream": ALWAYS, "logprobs": ALWAYS, "n": ALWAYS, "echo": ALWAYS, "usage": ALWAYS}


class Person(BaseModel, extra="forbid"):
    name: Literal["Tom", "Anna"]


def client(server: Server, mode: instructor.Mode) -> Any:
    plain = openai.OpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0)
    return instructor.from_openai(plain, mode=mode)


def ask(server: Server, mode: instructor.Mode, kind: Any = Person) -> Any:
    return client(server, mode).create(
        model=server.model, messages=MESSAGES, response_model=kind, max_tokens=ENOUGH, max_retries=0
    )


def chat(server: Server) -> None:
    answer = client(server, instructor.Mode.TOOLS).create(
        model=server.model, messages=MESSAGES, response_model=None, max_tokens=FEW
    )
    check_text(answer.choices[0].message.content)


def json_object(server: Server) -> None:
    """The text need not match the schema, which the server is not told: only its form is looked at."""
    try:
        check_person(ask(server, instructor.Mode.JSON))
    except Exception as error:
        assert "validation error" in str(error) or "incomplete" in str(error), error


def json_schema(server: Server) -> None:
    check_person(ask(server, instructor.Mode.JSON_SCHEMA))


def tools_auto(server: Server) -> None:
    """PARALLEL_TOOLS leaves the choice to the model, and a small model may well choose no tool."""
    try:
        list(ask(server, instructor.Mode.PARALLEL_TOOLS, Iterable[Person]))
    except Exception as error:
        assert "400" not in str(error), error


def tools_required(server: Server) -> None:
    check_person(ask(server, instructor.Mode.TOOLS_STRICT))


def tools_named(server: Server) -> None:
    check_person(ask(server, instructor.Mode.TOOLS))


def tools_streamed(server: Server) -> None:
    asked = client(server, instructor.Mode.TOOLS)
    parts = list(asked.create_partial(model=server.model, messages=MESSAGES, response_model=Person, max_tokens=ENOUGH))
    check_person(parts[-1])
