"""OpenAI's Agents SDK, on chat completions."""

import asyncio
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    StopAtTools,
    function_tool,
    set_tracing_disabled,
)
from calls.shared import ENOUGH, FEW, PROMPT, Server, check_person, check_stream, check_text
from openai import AsyncOpenAI
from pydantic import BaseModel

LACKS = {
    "n": "asks for one answer at a time",
    "json_object": "has structured outputs by a schema only",
    "echo": "chats only",
    "usage": "asks for usage at the end only",
}
ONCE: Any = {"max_tokens": ENOUGH, "parallel_tool_calls": False}
set_tracing_disabled(True)  # which would be sent to OpenAI


class Person(BaseModel, extra="forbid"):
    name: Literal["Tom", "Anna"]


@function_tool
def greet(name: Literal["Tom", "Anna"]) -> str:
    """Greet a person by name."""
    return name


def agent(server: Server, tools: Any = (), output: Any = None, **settings: Any) -> Agent[None]:
    client = AsyncOpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0)
    model = OpenAIChatCompletionsModel(server.model, client)
    whole = ModelSettings(**{"max_tokens": FEW, **settings})
    stop: Any = StopAtTools(stop_at_tool_names=["greet"])
    return Agent(
        "helper", model=model, model_settings=whole, tools=list(tools), output_type=output, tool_use_behavior=stop
    )


def run(asked: Agent[None]) -> Any:
    return Runner.run_sync(asked, PROMPT, max_turns=1)


def deltas(asked: Agent[None]) -> tuple[list[str], Any]:
    async def read() -> tuple[list[str], Any]:
        result = Runner.run_streamed(asked, PROMPT, max_turns=1)
        events = [event async for event in result.stream_events()]
        raw = [event.data for event in events if event.type == "raw_response_event"]
        return [data.delta for data in raw if data.type == "response.output_text.delta"], result.final_output

    return asyncio.run(read())


def chat(server: Server) -> None:
    check_text(run(agent(server)).final_output)


def stream(server: Server) -> None:
    check_stream(deltas(agent(server))[0])


def logprobs(server: Server) -> None:
    output = run(agent(server, top_logprobs=2)).raw_responses[0].output[0]
    assert len(output.content[0].logprobs) == FEW


def json_schema(server: Server) -> None:
    check_person(run(agent(server, output=Person, max_tokens=ENOUGH)).final_output)


def tools_auto(server: Server) -> None:
    assert run(agent(server, [greet], tool_choice="auto")).final_output is not None


def tools_required(server: Server) -> None:
    check_person({"name": run(agent(server, [greet], tool_choice="required", **ONCE)).final_output})


def tools_named(server: Server) -> None:
    check_person({"name": run(agent(server, [greet], tool_choice="greet", **ONCE)).final_output})


def tools_streamed(server: Server) -> None:
    check_person({"name": deltas(agent(server, [greet], tool_choice="greet", **ONCE))[1]})
