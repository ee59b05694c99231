"""LlamaIndex's `OpenAILike`."""

from typing import Any, Literal

from calls.shared import ENOUGH, FEW, NAMED, PROMPT, RESPONSE_FORMAT, Server, check_person, check_stream, check_text
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

LACKS = {"n": "returns one answer", "echo": "returns log-probabilities of the output only"}
MESSAGES = [ChatMessage(PROMPT)]


class Person(BaseModel, extra="forbid"):
    name: Literal["Tom", "Anna"]


def greet(name: Literal["Tom", "Anna"]) -> str:
    """Greet a person by name."""
    return name


def model(server: Server, **more: Any) -> OpenAILike:
    place: Any = {"model": server.model, "api_base": server.base_url, "api_key": server.api_key, "max_retries": 0}
    kind: Any = {"is_chat_model": True, "is_function_calling_model": True}
    return OpenAILike(**place, **kind, **{"max_tokens": FEW, **more})


def chat(server: Server) -> None:
    check_text(model(server).chat(MESSAGES).message.content)


def stream(server: Server) -> None:
    check_stream([chunk.delta or "" for chunk in model(server).stream_chat(MESSAGES)])


def logprobs(server: Server) -> None:
    answer = model(server, logprobs=True, top_logprobs=2).chat(MESSAGES)
    assert answer.logprobs is not None and len(answer.logprobs) == FEW


def json_object(server: Server) -> None:
    answer = model(server).chat(MESSAGES, response_format={"type": "json_object"})
    assert str(answer.message.content).startswith("{")


def json_schema(server: Server) -> None:
    answer = model(server, max_tokens=ENOUGH).chat(MESSAGES, response_format=RESPONSE_FORMAT)
    check_person(answer.message.content)


def tools_auto(server: Server) -> None:
    tool = FunctionTool.from_defaults(greet)
    answer = model(server).chat_with_tools([tool], PROMPT)
    assert answer.message.content or model(server).get_tool_calls_from_response(answer)


def tools_required(server: Server) -> None:
    tool = FunctionTool.from_defaults(greet)
    asked = model(server, max_tokens=ENOUGH)
    [call] = asked.get_tool_calls_from_response(asked.chat_with_tools([tool], PROMPT, tool_required=True))
    assert call.tool_name == "greet"
    check_person(call.tool_kwargs)


def tools_named(server: Server) -> None:
    tool = FunctionTool.from_defaults(greet)
    asked = model(server, max_tokens=ENOUGH)
    [call] = asked.get_tool_calls_from_response(asked.chat_with_tools([tool], PROMPT, tool_choice=NAMED))
    check_person(call.tool_kwargs)


def tools_streamed(server: Server) -> None:
    tool = FunctionTool.from_defaults(greet)
    asked = model(server, max_tokens=ENOUGH)
    *_, last = asked.stream_chat_with_tools([tool], PROMPT, tool_required=True)
    [call, *_] = asked.get_tool_calls_from_response(last)
    check_person(call.tool_kwargs)


def usage(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(model(server).stream_chat(MESSAGES, stream_options=options))
    check_stream([chunk.delta or "" for chunk in chunks])
    told = [chunk.raw.usage.completion_tokens for chunk in chunks if chunk.raw.usage]
    assert told[-1] == FEW and len(told) > 2
