"""OpenAI's own client, which most others stand on."""

from typing import Any

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
from openai import OpenAI

LACKS: dict[str, str] = {}


def ask(server: Server, **more: Any) -> Any:
    client = OpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0)
    return client.chat.completions.create(model=server.model, messages=MESSAGES, **{"max_tokens": FEW, **more})


def chat(server: Server) -> None:
    answer = ask(server)
    check_text(answer.choices[0].message.content)
    assert answer.usage.completion_tokens <= FEW


def stream(server: Server) -> None:
    check_stream([chunk.choices[0].delta.content or "" for chunk in ask(server, stream=True)])


def n(server: Server) -> None:
    assert [choice.index for choice in ask(server, n=2).choices] == [0, 1]


def logprobs(server: Server) -> None:
    content = ask(server, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert len(content) == FEW and all(len(token.top_logprobs) == 2 for token in content)


def json_object(server: Server) -> None:
    answer = ask(server, response_format={"type": "json_object"})
    assert answer.choices[0].message.content.startswith("{")


def json_schema(server: Server) -> None:
    check_person(ask(server, response_format=RESPONSE_FORMAT, max_tokens=ENOUGH).choices[0].message.content)


def tools(server: Server, choice: Any, **more: Any) -> Any:
    return ask(server, tools=[TOOL], tool_choice=choice, max_tokens=ENOUGH, **more)


def tools_auto(server: Server) -> None:
    message = ask(server, tools=[TOOL], tool_choice="auto").choices[0].message
    assert message.content or message.tool_calls


def tools_required(server: Server) -> None:
    choice = tools(server, "required", parallel_tool_calls=False).choices[0]
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    check_call(call.function.name, call.function.arguments)


def tools_named(server: Server) -> None:
    [call] = tools(server, NAMED).choices[0].message.tool_calls
    check_call(call.function.name, call.function.arguments)


def tools_streamed(server: Server) -> None:
    names, arguments = "", []
    for chunk in tools(server, NAMED, stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            names += call.function.name or ""
            arguments.append(call.function.arguments or "")
    check_call(names, "".join(arguments))
    assert len(arguments) > 1


def echo(server: Server) -> None:
    client = OpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0)
    answer = client.completions.create(model=server.model, prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    check_echo(answer.choices[0].text, answer.choices[0].logprobs.token_logprobs)


def usage(server: Server) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    told = [chunk.usage.completion_tokens for chunk in ask(server, stream=True, stream_options=options)]
    assert told == sorted(told) and told[-1] == FEW and len(set(told)) > 2
