"""`/v1/responses`, as the `openai` client sees it."""

import json
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response

from nanovllm.outputs import RequestOutput
from nanovllm.server.openai.responses import ResponsesRequest
from tests.server.harness import STORY
from tests.server.scripted import Scripted, ScriptedStream
from tests.server.test_process import ROOT
from tests.server.test_tools import CALL, CALL_IN_TWO, SCHEMA

WEATHER: Any = {"type": "function", "name": "weather", "description": "d", "parameters": SCHEMA}
NOT = {"type": "function", "name": "f", "parameters": {"not": {}}}
NAMED: Any = {"type": "function", "name": "weather"}


class City(pydantic.BaseModel):
    city: str


def respond(client: openai.OpenAI, **more: Any) -> Any:
    return client.responses.create(**{"model": "story", "input": STORY} | more)


def outline(response: Response) -> list[dict[str, Any]]:
    """What is in a response, without ids."""
    assert len({item.id for item in response.output}) == len(response.output)
    items = [item.to_dict() for item in response.output]
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


def text_item(text: str, status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "role": "assistant", "status": status, "content": [part]}


def call_item(arguments: str, status: str = "completed") -> dict[str, Any]:
    return {"type": "function_call", "name": "weather", "arguments": arguments, "status": status}


def thought_item(text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "summary": [], "status": "completed", "content": content}


def test_a_text(scripted: Scripted) -> None:
    script = scripted.says("Hello", " there.")
    response = respond(
        scripted.openai, instructions="Be kind.", max_output_tokens=9, temperature=0.5, top_p=0.9, metadata={"a": "b"},
        store=True, extra_body={"top_k": 3, "seed": 5},
    )  # fmt: skip
    assert response.output_text == "Hello there." and response.status == "completed" and response.object == "response"
    assert outline(response) == [text_item("Hello there.")] and response.id.startswith("resp_")
    assert (response.instructions, response.temperature, response.metadata) == ("Be kind.", 0.5, {"a": "b"})
    assert script.prompt.startswith(f"<|system|>\nBe kind.\n<|user|>\n{STORY}\n<|assistant|>")
    params = script.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.seed) == (9, 0.5, 0.9, 3, 5)
    usage = response.usage
    assert usage.output_tokens == 1 and usage.total_tokens == usage.input_tokens + 1 and usage.input_tokens > 10


@pytest.mark.parametrize(
    ("pieces", "reason", "items"),
    [
        (["Hello", " there."], "stop", [text_item("Hello there.")]),
        ([""], "stop", [text_item("")]),
        (["<think>A ci", "ty.</think>", "So.\n", *CALL_IN_TWO], "stop",
         [thought_item("A city."), text_item("So."), call_item('{"city": "Oslo"}')]),
        ([CALL, "\n", CALL], "stop", [call_item('{"city": "Oslo"}')] * 2),
        ([f"{CALL}Now ", "this.", CALL, "So."], "stop",
         [call_item('{"city": "Oslo"}'), text_item("Now this."), call_item('{"city": "Oslo"}'), text_item("So.")]),
        (["Hel"], "length", [text_item("Hel", "incomplete")]),
        ([CALL, CALL_IN_TWO[0]], "length", [call_item('{"city": "Oslo"}'), call_item('{"city": "Oslo"', "incomplete")]),
    ],
)  # fmt: skip
def test_streams_join_to_the_whole_response(scripted: Scripted, pieces: list[str], reason: Any, items: Any) -> None:
    scripted.says(*pieces, finish_reason=reason)
    whole = respond(scripted.openai, tools=[WEATHER])
    assert outline(whole) == items and whole.status == ("incomplete" if reason == "length" else "completed")
    assert (whole.incomplete_details is None) == (reason != "length")
    events = list(respond(scripted.openai, tools=[WEATHER], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole.status}" and events[0].response.id == events[-1].response.id
    assert outline(events[-1].response) == items and events[0].response.usage is None
    assert events[-1].response.usage.output_tokens == len(pieces)
    # Each item: added, grown by deltas, done.
    joined: dict[int, dict[str, Any]] = {}
    for event in events[2:-1]:
        here = joined.setdefault(event.output_index, {"text": ""})
        kind = event.type.removeprefix("response.")
        assert "item" not in here or not here.get("done"), "an item went on after its end"
        if kind == "output_item.added":
            here["item"] = event.item
            assert event.item.status == "in_progress" and not getattr(event.item, "content", None)
        elif kind.endswith(".delta"):
            assert event.item_id == here["item"].id
            here["text"] += event.delta
        elif kind.endswith(("text.done", "arguments.done")):
            assert here["text"] == (event.arguments if "arguments" in kind else event.text)
        elif kind == "output_item.done":
            here["done"] = event.item
            assert event.item == events[-1].response.output[event.output_index]
    assert list(joined) == list(range(len(items))) and all(
        item["done"].id == item["item"].id for item in joined.values()
    )


def test_the_client_follows_a_stream(scripted: Scripted) -> None:
    scripted.says("So.\n", *CALL)
    with scripted.openai.responses.stream(model="story", input=STORY, tools=[WEATHER | {"strict": True}]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert {"response.output_text.delta", "response.function_call_arguments.done", "response.completed"} <= kinds
    assert final.output_text == "So." and final.output[1].parsed_arguments == {"city": "Oslo"}


def test_a_conversation_with_calls(scripted: Scripted) -> None:
    """The client sends back what it got, and the results of its functions."""
    script = scripted.says(f"<think>A city.</think>So.\n{CALL}\n{CALL}")
    first = respond(scripted.openai, tools=[WEATHER])
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": output}
        for item, output in zip(first.output[2:], ("rain", [{"type": "input_text", "text": "sun"}]), strict=True)
    ]
    history = [{"role": "user", "content": [{"type": "input_text", "text": STORY}]}, *first.output, *results]
    scripted.says("It rains.")
    second = respond(scripted.openai, input=history, tools=[WEATHER])
    assert second.output_text == "It rains."
    called = '<tool_call>weather {"city": "Oslo"}</tool_call>\n'
    ids = [item.call_id for item in first.output[2:]]
    expected = f"<|assistant|>\n<think>A city.</think>So.\n{called}{called}"
    expected += f"<|tool {ids[0]}|>\nrain\n<|tool {ids[1]}|>\nsun\n<|assistant|>\n"
    assert expected in scripted.engine.script.prompt and script is not scripted.engine.script
    respond(scripted.openai, input=[*history, *second.output, {"role": "user", "content": "Thanks."}])
    assert "<|assistant|>\nIt rains.\n<|user|>\nThanks.\n" in scripted.engine.script.prompt


def test_what_stands_between_a_call_and_its_result_belongs_to_the_call(scripted: Scripted) -> None:
    """Otherwise a message would stand between them, and templates want the result right behind the call."""
    scripted.says(f"{CALL}Now this.\n{CALL}So.")
    first = respond(scripted.openai, tools=[WEATHER])
    assert [item.type for item in first.output] == ["function_call", "message"] * 2
    ids = [item.call_id for item in first.output[::2]]
    results = [{"type": "function_call_output", "call_id": call_id, "output": "rain"} for call_id in ids]
    respond(scripted.openai, input=[{"role": "user", "content": STORY}, *first.output, *results], tools=[WEATHER])
    called = '<tool_call>weather {"city": "Oslo"}</tool_call>\n'
    expected = f"<|assistant|>\nNow this.\nSo.\n{called}{called}"
    expected += "".join(f"<|tool {call_id}|>\nrain\n" for call_id in ids)
    assert expected in scripted.engine.script.prompt
    apart = [{"role": role, "content": text} for role, text in (("assistant", "a"), ("assistant", "b"), ("user", "c"))]
    respond(scripted.openai, input=apart)
    assert "<|assistant|>\na\n<|assistant|>\nb\n<|user|>\nc\n" in scripted.engine.script.prompt


def test_a_model_of_pydantic_is_filled(client: openai.OpenAI, scripted: Scripted) -> None:
    scripted.says('{"city": "Oslo"}')
    parsed = scripted.openai.responses.parse(model="story", input=STORY, text_format=City)
    assert parsed.output_parsed == City(city="Oslo")
    structure = scripted.engine.script.params.structured_outputs
    assert structure is not None and "city" in str(structure.grammar)  # after reasoning
    respond(scripted.openai, text={"format": {"type": "json_object"}, "verbosity": "low"})


@pytest.mark.slow
def test_a_real_model_is_forced(client: openai.OpenAI) -> None:
    for choice in "required", NAMED:
        call = respond(client, tools=[WEATHER], tool_choice=choice, max_output_tokens=150).output[0]
        assert call.name == "weather" and json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    form = {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}}
    assert json.loads(respond(client, text=form, max_output_tokens=150).output_text)["city"] in ("Oslo", "Rome")
    events = list(respond(client, text=form, max_output_tokens=150, stream=True, temperature=0))
    assert json.loads(events[-1].response.output_text)["city"] in ("Oslo", "Rome")


def test_an_error_in_a_stream_is_a_failed_response(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    read = ScriptedStream.__anext__

    async def fail(self: ScriptedStream) -> RequestOutput:
        output = await read(self)
        output.outputs[0].finish_reason = "error" if output.finished else None
        return output

    monkeypatch.setattr(ScriptedStream, "__anext__", fail)
    scripted.says("Hel", "lo")
    *_, last = respond(scripted.openai, stream=True)
    assert last.type == "response.failed" and last.response.status == "failed"
    assert "not finite" in last.response.error.message and outline(last.response) == [text_item("Hel", "incomplete")]
    with pytest.raises(openai.InternalServerError, match="not finite"):
        respond(scripted.openai)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "required"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "must be a message"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input.0.role", "assistant"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
        ({"input": "a", "background": True}, "background", "would change the answer"),
        ({"input": "a", "n": 2}, "n", "would change the answer"),
        ({"input": "a", "include": ["message.output_text.logprobs"]}, "include", "would change the answer"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools.0.type", "function"),
        ({"input": "a", "tools": [NOT], "tool_choice": "required"}, "tools.0.parameters", '"not"'),
        ({"input": "a", "tool_choice": "required"}, "tool_choice", "no tools"),
        (
            {"input": "a", "tools": [WEATHER], "text": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            "text.format", '"not"',
        ),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "greater"),
        ({"input": "a", "max_tokens": 9}, "max_tokens", "its name here is max_output_tokens"),
        ({"input": "a", "response_format": {"type": "json_object"}}, "response_format", "text.format"),
        ({"input": "a", "text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format", '"not"'),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input.0.content.0.type", "reads no images"),
        ({"input": "a", "model": "other"}, None, "no model 'other'"),
        ({"input": "x" * 10**6}, "input", "max_model_len"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}]}, "input", "an object"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_name(scripted: Scripted, body: Any, param: str | None, message: str) -> None:
    answer = scripted.http.post("/responses", json=body)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404) and error["param"] == param and message in error["message"], error


def post(scripted: Scripted, body: Any) -> Any:
    """Send a body that may have what is no JSON by the book."""
    headers = {"Content-Type": "application/json"}
    return scripted.http.post("/responses", content=json.dumps(body), headers=headers)


@pytest.mark.parametrize("body", [
    {"tools": [WEATHER | {"tomorrow": "\ud800"}]},
    {"tools": [WEATHER], "tool_choice": NAMED | {"tomorrow": float("nan")}},
    {"text": {"format": {"type": "text", "tomorrow": "\ud800"}}},
])  # fmt: skip
def test_what_nobody_knows_is_not_repeated(scripted: Scripted, body: Any) -> None:
    scripted.says(CALL)
    answer = post(scripted, {"input": "a"} | body)
    assert answer.status_code == 200 and "tomorrow" not in answer.text, answer.text


@pytest.mark.parametrize(("body", "param", "message"), [
    ({"tools": [WEATHER | {"parameters": {"maximum": float("inf")}}]}, "tools.0.parameters", "JSON compliant"),
    ({"temperatur\ud800": 1}, "temperatur?", "temperature"),
])  # fmt: skip
def test_what_cannot_be_sent_is_refused(scripted: Scripted, body: Any, param: str, message: str) -> None:
    answer = post(scripted, {"input": "a"} | body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and message in error["message"], error


def test_what_says_nothing_is_accepted(scripted: Scripted) -> None:
    scripted.says("Hello.")
    nothing = {
        "store": False, "truncation": "disabled", "include": [], "background": False, "reasoning": {"effort": "low"},
        "service_tier": "auto", "user": "me", "prompt_cache_key": "k", "stream_options": {"include_obfuscation": False},
        "tools": [], "tool_choice": "auto", "previous_response_id": None, "top_logprobs": 0, "a_field_of_tomorrow": 1,
    }  # fmt: skip
    answer = scripted.http.post("/responses", json={"input": "a"} | nothing)
    assert answer.status_code == 200, answer.text


def test_the_documentation_says_of_every_field_what_is_done_with_it() -> None:
    document = (ROOT / "docs" / "server.md").read_text("utf-8")
    section = document.partition("## Responses\n")[2].partition("\n## ")[0]
    for name in ResponsesRequest.model_fields:
        assert f"`{name}`" in section, name
    for name in (
        ResponsesRequest.harmless.keys() - {"messages", "n"} - set(document.partition("## Responses")[0].split("`"))
    ):
        assert f"`{name}`" in section, name
