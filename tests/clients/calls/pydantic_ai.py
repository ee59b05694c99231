"""Pydantic AI's agents."""

import asyncio
from typing import Any, Literal

from calls.shared import ENOUGH, FEW, PROMPT, Server, check_person, check_stream, check_text
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

LACKS = {"n": "asks for one answer at a time", "echo": "chats only", "tools_named": "cannot name a tool"}


class Person(BaseModel, extra="forbid"):
    name: Literal["Tom", "Anna"]


def agent(server: Server, output: Any = str, **settings: Any) -> Agent[None, Any]:
    provider = OpenAIProvider(base_url=server.base_url, api_key=server.api_key)
    model = OpenAIChatModel(server.model, provider=provider)
    whole: Any = {"max_tokens": FEW if output is str else ENOUGH, **settings}
    return Agent(model, output_type=output, model_settings=whole, retries=0)


def chat(server: Server) -> None:
    check_text(agent(server).run_sync(PROMPT).output)


def pieces(asked: Agent[None, Any]) -> list[str]:
    async def read() -> list[str]:
        async with asked.run_stream(PROMPT) as result:
            return [piece async for piece in result.stream_text(delta=True, debounce_by=None)]

    return asyncio.run(read())


def stream(server: Server) -> None:
    check_stream(pieces(agent(server)))


def logprobs(server: Server) -> None:
    asked = agent(server, openai_logprobs=True, openai_top_logprobs=2)
    response: Any = asked.run_sync(PROMPT).all_messages()[-1]
    assert len(response.provider_details["logprobs"]) == FEW


def json_object(server: Server) -> None:
    """A small model need not follow the schema in the prompt; that is told as an error about validation."""
    try:
        check_person(agent(server, PromptedOutput(Person)).run_sync(PROMPT).output)
    except Exception as error:
        assert "status_code" not in str(error), error


def json_schema(server: Server) -> None:
    check_person(agent(server, NativeOutput(Person)).run_sync(PROMPT).output)


def tools_auto(server: Server) -> None:
    asked = agent(server)

    @asked.tool_plain
    def greet(name: Literal["Tom", "Anna"]) -> str:
        """Greet a person by name."""
        return f"Hello {name}"

    assert asked.run_sync(PROMPT).output is not None


def tools_required(server: Server) -> None:
    check_person(agent(server, ToolOutput(Person), parallel_tool_calls=False).run_sync(PROMPT).output)


def tools_streamed(server: Server) -> None:
    async def read() -> Any:
        async with agent(server, ToolOutput(Person), parallel_tool_calls=False).run_stream(PROMPT) as result:
            return await result.get_output()

    check_person(asyncio.run(read()))


def usage(server: Server) -> None:
    check_stream(pieces(agent(server, openai_continuous_usage_stats=True)))
