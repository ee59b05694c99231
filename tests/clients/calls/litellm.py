"""LiteLLM, by its provider for servers that speak OpenAI's protocol."""

from typing import Any

import litellm
from calls.shared import (
    ENOUGH,
    FEW,
    MESSAGES,
    NAMED,
    PROMPT,
    RESPONSE_FORMAT,
    TOOL,
    Server,
    check_call,
    check_echo,
    check_person,
    check_stream,
    check_text,
)

LACKS: dict[str, str] = {}


def place(server: Server) -> dict[str, Any]:
    return {"api_base": server.base_url, "api_key": server.api_key, "num_retries": 0}


def ask(server: Server, **more: Any) -> Any:
    model = f"openai/{server.model}"
    return litellm.completion(model=model, messages=MESSAGES, **place(server), **{"max_tokens": FEW, **more})


def chat(server: Server) -> None:
    check_text(ask(server).choices[0].message.content)


def stream(server: Server) -> None:
    check_stream([chunk.choices[0].delta.content or "" for chunk in ask(server, stream=True)])


def n(server: Server) -> None:
    assert len(ask(server, n=2).choices) == 2


def logprobs(server: Server) -> None:
    assert len(ask(server, logprobs=True, top_logprobs=2).choices[0].logprobs.content) == FEW


def json_object(server: Server) -> None:
    assert ask(server, response_format={"type": "json_object"}).choices[0].message.content.startswith("{")


def json_schema(server: Server) -> None:
    check_person(ask(server, response_format=RESPONSE_FORMAT, max_tokens=ENOUGH).choices[0].message.content)


def tools_auto(server: Server) -> None:
    message = ask(server, tools=[TOOL], tool_choice="auto").choices[0].message
    assert message.content or message.tool_calls


def tools_required(server: Server) -> None:
    answer = ask(server, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=ENOUGH)
    [call] = answer.choices[0].message.tool_calls
    check_call(call.function.name, call.function.arguments)


def tools_named(server: Server) -> None:
    [call] = ask(server, tools=[TOOL], tool_choice=NAMED, max_tokens=ENOUGH).choices[0].message.tool_calls
    check_call(call.function.name, call.function.arguments)


def tools_streamed(server: Server) -> None:
    chunks = list(ask(server, tools=[TOOL], tool_choice=NAMED, max_tokens=ENOUGH, stream=True))
    whole: Any = litellm.stream_chunk_builder(chunks)
    [call] = whole.choices[0].message.tool_calls
    check_call(call.function.name, call.function.arguments)


def echo(server: Server) -> None:
    model = f"text-completion-openai/{server.model}"
    answer: Any = litellm.text_completion(
        model=model, prompt=PROMPT, max_tokens=0, echo=True, logprobs=1, **place(server)
    )
    check_echo(answer.choices[0].text, answer.choices[0].logprobs.token_logprobs)


def usage(server: Server) -> None:
    chunks = list(ask(server, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    check_stream([chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices])
    assert chunks[-1].usage.completion_tokens == FEW
