"""smolagents' `OpenAIModel`."""

from typing import Any

from calls.shared import (
    ENOUGH,
    FEW,
    PROMPT,
    RESPONSE_FORMAT,
    Server,
    check_person,
    check_stream,
    check_text,
)
from smolagents import OpenAIModel, tool

LACKS = {"n": "asks for one answer at a time", "echo": "chats only", "usage": "asks for usage at the end only"}
MESSAGES: Any = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]


@tool
def greet(name: str) -> str:
    """Greet a person by name.

    Args:
        name: who is greeted
    """
    return f"Hello {name}"


def model(server: Server, **more: Any) -> Any:
    place = {"model_id": server.model, "api_base": server.base_url, "api_key": server.api_key}
    return OpenAIModel(**place, client_kwargs={"max_retries": 0}, **{"max_tokens": FEW, **more})


def chat(server: Server) -> None:
    check_text(model(server).generate(MESSAGES).content)


def stream(server: Server) -> None:
    check_stream([delta.content or "" for delta in model(server).generate_stream(MESSAGES)])


def logprobs(server: Server) -> None:
    answer = model(server, logprobs=True, top_logprobs=2).generate(MESSAGES)
    assert len(answer.raw.choices[0].logprobs.content) == FEW


def json_object(server: Server) -> None:
    assert model(server).generate(MESSAGES, response_format={"type": "json_object"}).content.startswith("{")


def json_schema(server: Server) -> None:
    check_person(model(server, max_tokens=ENOUGH).generate(MESSAGES, response_format=RESPONSE_FORMAT).content)


def check_calls(calls: Any) -> None:
    for call in calls:
        assert call.function.name == "greet" and call.function.arguments, call


def tools_auto(server: Server) -> None:
    answer = model(server, tool_choice="auto").generate(MESSAGES, tools_to_call_from=[greet])
    assert answer.content or answer.tool_calls


def tools_required(server: Server) -> None:
    check_calls(model(server, max_tokens=ENOUGH).generate(MESSAGES, tools_to_call_from=[greet]).tool_calls)


def tools_named(server: Server) -> None:
    named = {"type": "function", "function": {"name": "greet"}}
    answer = model(server, max_tokens=ENOUGH, tool_choice=named).generate(MESSAGES, tools_to_call_from=[greet])
    check_calls(answer.tool_calls)


def tools_streamed(server: Server) -> None:
    deltas = model(server, max_tokens=ENOUGH).generate_stream(MESSAGES, tools_to_call_from=[greet])
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert "greet" in "".join(call.function.name or "" for call in calls)
    assert "name" in "".join(call.function.arguments or "" for call in calls)
