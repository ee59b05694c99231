"""Haystack's `OpenAIChatGenerator` and `OpenAIGenerator`."""

from typing import Any

from calls.shared import (
    ENOUGH,
    FEW,
    FUNCTION,
    NAMED,
    PROMPT,
    RESPONSE_FORMAT,
    SCHEMA,
    Server,
    check_call,
    check_object,
    check_person,
    check_stream,
    check_text,
)
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import Tool
from haystack.utils import Secret

LACKS = {"echo": "chats only"}


def ask(server: Server, tools: Any = None, listen: Any = None, **more: Any) -> Any:
    generator = OpenAIChatGenerator(
        model=server.model,
        api_base_url=server.base_url,
        api_key=Secret.from_token(server.api_key),
        generation_kwargs={"max_tokens": FEW, **more},
        tools=tools,
        streaming_callback=listen,
        max_retries=0,
    )
    return generator.run([ChatMessage.from_user(PROMPT)])["replies"]


def streamed(server: Server, **more: Any) -> tuple[list[StreamingChunk], Any]:
    chunks: list[StreamingChunk] = []
    return chunks, ask(server, listen=chunks.append, **more)


def tool() -> Tool:
    return Tool(
        name=FUNCTION["name"], description=FUNCTION["description"], parameters=SCHEMA, function=lambda name: name
    )


def chat(server: Server) -> None:
    check_text(ask(server)[0].text)


def stream(server: Server) -> None:
    check_stream([chunk.content for chunk in streamed(server)[0]])


def n(server: Server) -> None:
    assert len(ask(server, n=2)) == 2


def logprobs(server: Server) -> None:
    assert len(ask(server, logprobs=True, top_logprobs=2)[0].meta["logprobs"]["content"]) == FEW


def json_object(server: Server) -> None:
    check_object(lambda: ask(server, response_format={"type": "json_object"})[0].text)


def json_schema(server: Server) -> None:
    check_person(ask(server, response_format=RESPONSE_FORMAT, max_tokens=ENOUGH)[0].text)


def tools_auto(server: Server) -> None:
    [reply] = ask(server, [tool()], tool_choice="auto")
    assert reply.text or reply.tool_calls


def tools_required(server: Server) -> None:
    once = {"parallel_tool_calls": False, "max_tokens": ENOUGH}
    [call] = ask(server, [tool()], tool_choice="required", **once)[0].tool_calls
    check_call(call.tool_name, call.arguments)


def tools_named(server: Server) -> None:
    [call] = ask(server, [tool()], tool_choice=NAMED, max_tokens=ENOUGH)[0].tool_calls
    check_call(call.tool_name, call.arguments)


def tools_streamed(server: Server) -> None:
    _, [reply] = streamed(server, tools=[tool()], tool_choice=NAMED, max_tokens=ENOUGH)
    [call] = reply.tool_calls
    check_call(call.tool_name, call.arguments)


def usage(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks, [reply] = streamed(server, stream_options=options)
    check_stream([chunk.content for chunk in chunks])
    assert reply.meta["usage"]["completion_tokens"] == FEW
