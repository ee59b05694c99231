"""LangChain's `ChatOpenAI` and `OpenAI`."""

from typing import Any

from calls.shared import (
    ENOUGH,
    FEW,
    PROMPT,
    SCHEMA,
    TOOL,
    Server,
    check_call,
    check_echo,
    check_object,
    check_person,
    check_stream,
    check_text,
)
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAI

LACKS: dict[str, str] = {}


def model(server: Server, **more: Any) -> ChatOpenAI:
    place: Any = {"base_url": server.base_url, "api_key": server.api_key, "model": server.model, "max_retries": 0}
    return ChatOpenAI(**place, **{"max_tokens": FEW, **more})


def chat(server: Server) -> None:
    check_text(model(server).invoke(PROMPT).content)


def stream(server: Server) -> None:
    check_stream([chunk.content for chunk in model(server).stream(PROMPT)])


def n(server: Server) -> None:
    assert len(model(server, n=2).generate([[HumanMessage(PROMPT)]]).generations[0]) == 2


def logprobs(server: Server) -> None:
    told = model(server, logprobs=True, top_logprobs=2).invoke(PROMPT).response_metadata["logprobs"]
    assert len(told["content"]) == FEW


def json_object(server: Server) -> None:
    asked = model(server).bind(response_format={"type": "json_object"})
    check_object(lambda: asked.invoke(PROMPT).content)


def json_schema(server: Server) -> None:
    schema = {"title": "person", "description": "A person.", **SCHEMA}
    asked = model(server, max_tokens=ENOUGH).with_structured_output(schema, method="json_schema", strict=True)
    check_person(asked.invoke(PROMPT))


def named(server: Server) -> Any:
    return model(server, max_tokens=ENOUGH).bind_tools([TOOL], tool_choice="greet")


def tools_auto(server: Server) -> None:
    answer = model(server).bind_tools([TOOL], tool_choice="auto").invoke(PROMPT)
    assert answer.content or answer.tool_calls


def tools_required(server: Server) -> None:
    asked = model(server, max_tokens=ENOUGH).bind_tools([TOOL], tool_choice="any", parallel_tool_calls=False)
    [call] = asked.invoke(PROMPT).tool_calls
    check_call(call["name"], call["args"])


def tools_named(server: Server) -> None:
    [call] = named(server).invoke(PROMPT).tool_calls
    check_call(call["name"], call["args"])


def tools_streamed(server: Server) -> None:
    whole: Any = None
    for chunk in named(server).stream(PROMPT):
        whole = chunk if whole is None else whole + chunk
    [call] = whole.tool_calls
    check_call(call["name"], call["args"])


def echo(server: Server) -> None:
    place: Any = {"base_url": server.base_url, "api_key": server.api_key, "model": server.model, "max_retries": 0}
    asked = OpenAI(**place, max_tokens=1, logprobs=1, model_kwargs={"echo": True})
    [[found]] = asked.generate([PROMPT]).generations
    assert found.generation_info is not None
    check_echo(found.text, found.generation_info["logprobs"]["token_logprobs"])


def usage(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(model(server, stream_usage=True).stream(PROMPT, stream_options=options))
    check_stream([chunk.content for chunk in chunks])
    assert any(chunk.usage_metadata is not None for chunk in chunks)
