"""What all clients ask for, and what must come back: form only, since the models are small."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

CALLS = {
    "chat": "chat",
    "stream": "stream",
    "n": "`n`",
    "logprobs": "`logprobs`",
    "json_object": "`json_object`",
    "json_schema": "`json_schema`",
    "tools_auto": "tools: auto",
    "tools_required": "required",
    "tools_named": "named",
    "tools_streamed": "streamed",
    "echo": "`echo`",
    "usage": "continuous usage",
}

PROMPT = "Nell the fox had a red kite."
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
FEW = 8  # tokens
ENOUGH = 200  # for a JSON text that a grammar brings to its end
SCHEMA: Any = {
    "type": "object",
    "properties": {"name": {"type": "string", "enum": ["Tom", "Anna"]}},
    "required": ["name"],
    "additionalProperties": False,
}
RESPONSE_FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
FUNCTION: Any = {"name": "greet", "description": "Greet a person by name.", "parameters": SCHEMA}
TOOL: Any = {"type": "function", "function": FUNCTION}
NAMED: Any = {"type": "function", "function": {"name": "greet"}}


class Server(NamedTuple):
    base_url: str  # with /v1
    model: str
    tokenizer: str  # the directory of the checkpoint
    api_key: str = "none"


def check_text(text: Any) -> None:
    assert isinstance(text, str) and text.strip(), f"no text: {text!r}"


def check_person(found: Any) -> None:
    """What `SCHEMA` allows, as text, as a dict or as an object."""
    found = json.loads(found) if isinstance(found, str) else found
    found = found if isinstance(found, dict) else {"name": found.name}
    assert found in ({"name": "Tom"}, {"name": "Anna"}), found


def check_call(name: Any, arguments: Any) -> None:
    assert name == "greet", name
    check_person(arguments)


def check_object(ask: Callable[[], Any]) -> None:
    """JSON at least begins. Some clients raise OpenAI's error for what has no room to end, with the text in it."""
    try:
        text = ask()
    except Exception as error:
        if type(error).__name__ != "LengthFinishReasonError":
            raise
        completion: Any = error.completion  # type: ignore[attr-defined]
        text = completion.choices[0].message.content
    assert text.startswith("{"), text


def check_stream(pieces: list[Any]) -> None:
    assert len(pieces) > 1, f"the text came in {len(pieces)} pieces"
    check_text("".join(pieces))


def check_echo(text: str, values: list[Any]) -> None:
    assert text.startswith(PROMPT), text
    assert values[0] is None and len(values) > 3 and all(value <= 0 for value in values[1:]), values
