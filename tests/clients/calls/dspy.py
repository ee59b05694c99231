"""DSPy, which reaches servers through LiteLLM."""

import asyncio
from typing import Any

import dspy
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
    check_person,
    check_text,
)

LACKS = {"echo": "chats only", "tools_streamed": "returns calls as a whole", "usage": "asks for usage at the end only"}


def model(server: Server, **more: Any) -> Any:
    place: Any = {"api_base": server.base_url, "api_key": server.api_key, "cache": False, "num_retries": 0}
    return dspy.LM(f"openai/{server.model}", **place, **{"max_tokens": FEW, **more})


def first(answer: Any) -> Any:
    return answer[0]["text"] if isinstance(answer[0], dict) else answer[0]


def chat(server: Server) -> None:
    check_text(first(model(server)(PROMPT)))


def stream(server: Server) -> None:
    """A small model need not keep to the form that the adapter asks for: then the chunks are all that comes."""

    class Answer(dspy.Signature):
        question: str = dspy.InputField()
        answer: str = dspy.OutputField()

    async def read() -> list[Any]:
        program = dspy.streamify(dspy.Predict(Answer), include_final_prediction_in_output_stream=True)
        chunks = []
        try:
            with dspy.context(
                lm=model(server, max_tokens=3 * FEW), adapter=dspy.ChatAdapter(use_json_adapter_fallback=False)
            ):
                async for chunk in program(question=PROMPT):
                    chunks.append(chunk)
        except BaseException as error:
            assert "400" not in str(error), error
        return chunks

    assert len(asyncio.run(read())) > 1


def n(server: Server) -> None:
    assert len(model(server, n=2, temperature=0.7)(PROMPT)) == 2


def logprobs(server: Server) -> None:
    [answer] = model(server, logprobs=True, top_logprobs=2)(PROMPT)
    assert len(answer["logprobs"].content) == FEW


def json_object(server: Server) -> None:
    assert first(model(server)(PROMPT, response_format={"type": "json_object"})).startswith("{")


def json_schema(server: Server) -> None:
    check_person(first(model(server, max_tokens=ENOUGH)(PROMPT, response_format=RESPONSE_FORMAT)))


def call(server: Server, choice: Any) -> Any:
    more = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    [answer] = model(server, max_tokens=ENOUGH)(messages=MESSAGES, **more)
    return answer["tool_calls"]


def tools_auto(server: Server) -> None:
    assert model(server)(messages=MESSAGES, tools=[TOOL], tool_choice="auto")


def tools_required(server: Server) -> None:
    [found] = call(server, "required")
    check_call(found["function"]["name"], found["function"]["arguments"])


def tools_named(server: Server) -> None:
    [found] = call(server, NAMED)
    check_call(found["function"]["name"], found["function"]["arguments"])
