"""Tool calls and reasoning over HTTP: what a model writes, or is forced to write, as OpenAI's clients read it."""

import json
import re
from functools import reduce
from typing import Any

import httpx
import openai
import pytest

from nanovllm.llm import EMBEDDED_MODEL
from nanovllm.text.tokenizer import Tokenizer
from tests.server.harness import STORY, Served
from tests.server.scripted import TEMPLATE, Scripted

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}
NOW: Any = {"type": "function", "function": {"name": "now"}}
TOOLS: Any = [WEATHER, NOW]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
NO_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}
DEEP: Any = reduce(lambda inner, _: {"not": inner}, range(120), dict[str, Any]())
MESSAGES: Any = [{"role": "user", "content": STORY}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CALL_IN_TWO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"', "}}\n</tool_call>"


def chat(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": "story", "messages": MESSAGES, "max_tokens": 180} | more)


def joined(chunks: Any) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
    """The messages of a stream by choice, and their ends, as a client would join them by OpenAI's description."""
    messages: dict[int, dict[str, Any]] = {}
    reasons = {}
    for chunk in chunks:
        for choice in chunk.choices:
            message = messages.setdefault(choice.index, {"content": "", "reasoning": "", "tool_calls": []})
            assert choice.index not in reasons, "a choice went on after its end"
            delta = choice.delta
            message["content"] += delta.content or ""
            message["reasoning"] += getattr(delta, "reasoning", None) or ""
            for call in delta.tool_calls or []:
                calls = message["tool_calls"]
                if call.index == len(calls):  # begins with its id and name
                    assert call.id and call.type == "function" and call.function.name
                    calls.append({"name": call.function.name, "arguments": "", "id": call.id})
                else:
                    assert call.index == len(calls) - 1 and not call.id and not call.function.name
                calls[call.index]["arguments"] += call.function.arguments or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return messages, reasons


def plain(message: Any) -> dict[str, Any]:
    """A whole message, as `joined` has those of streams."""
    calls = [call.function.model_dump() | {"id": call.id} for call in message.tool_calls or []]
    said = {"content": message.content or "", "reasoning": getattr(message, "reasoning", None) or ""}
    assert said["reasoning"] == (getattr(message, "reasoning_content", None) or "")
    return said | {"tool_calls": calls}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"call_[0-9a-f]{24}", i) for i in ids)
    calls = [{name: value for name, value in call.items() if name != "id"} for call in message["tool_calls"]]
    return message | {"tool_calls": calls}


# --- calls that are forced, by a real model --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_forced_calls_always_parse(client: openai.OpenAI, choice: Any) -> None:
    """Of a model that cannot call tools, with a template that does not know them."""
    more: Any = {"tools": TOOLS, "tool_choice": choice, "temperature": 0.5, "seed": 3, "parallel_tool_calls": False}
    more |= {"n": 1 if choice == NAMED else 2}
    whole = chat(client, **more).choices
    for answer in whole:
        assert answer.finish_reason == "tool_calls" and answer.message.content is None
        [call] = answer.message.tool_calls
        assert call.function.name == "weather" or choice == "required"
        expected = [{"city": "Oslo"}, {"city": "Rome"}] if call.function.name == "weather" else [{}]
        assert json.loads(call.function.arguments) in expected
    messages, reasons = joined(chat(client, stream=True, **more))
    assert reasons == dict.fromkeys(range(len(whole)), "tool_calls")
    for i, answer in enumerate(whole):
        assert without_ids(messages[i]) == without_ids(plain(answer.message))


@pytest.mark.slow
def test_several_calls_may_be_required(client: openai.OpenAI) -> None:
    answers = chat(client, n=8, tools=TOOLS, tool_choice="required", temperature=2, seed=1).choices
    calls = [call for answer in answers for call in answer.message.tool_calls]
    assert len(calls) > len(answers) and len({call.id for call in calls}) == len(calls)


@pytest.mark.slow
def test_a_call_that_is_cut_off_keeps_what_there_is(client: openai.OpenAI) -> None:
    schema = {"properties": {"text": {"type": "string", "minLength": 500}}, "required": ["text"]}
    long = {"type": "function", "function": {"name": "f", "parameters": schema}}
    [answer] = chat(client, tools=[long], tool_choice="required", max_tokens=60, seed=1).choices
    assert answer.finish_reason == "length" and len(answer.message.tool_calls[0].function.arguments) > len('{"text":')


# --- calls that a model chooses --------------------------------------------------------------------------------------

HERMES_OUTPUTS = [
    "Hello.",
    CALL,
    f"Let me see.\n{CALL}\n{CALL.replace('Oslo', 'Rome')}",
    f"<think>\nA city.\n</think>\n\nSo.\n{CALL}",
    f"<think>\nA city.\n</think>\n\n{CALL}\n",
    "<think>forever",
    "A <tool_call> that is none",
    '<tool_call>{"name": "weather"}</tool_call>',
]


@pytest.mark.parametrize("text", HERMES_OUTPUTS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_streams_join_to_the_whole_answer(scripted: Scripted, text: str, size: int) -> None:
    scripted.says(*(text[i : i + size] for i in range(0, len(text), size)))
    whole = chat(scripted.openai, tools=TOOLS).choices[0]
    messages, reasons = joined(chat(scripted.openai, tools=TOOLS, stream=True))
    assert without_ids(messages[0]) == without_ids(plain(whole.message)) and reasons == {0: whole.finish_reason}
    assert whole.finish_reason == ("tool_calls" if CALL in text else "stop")
    said = "".join([whole.message.content or "", getattr(whole.message, "reasoning", "")])
    assert ("tool_call>" in said) == ("none" in text or ("arguments" not in text and "tool_call" in text))
    assert scripted.engine.script.params.structured_outputs is None


def test_openai_reads_whole_and_streamed_answers(scripted: Scripted) -> None:
    scripted.says("<think>A ", "city.</think>", "So.\n", *CALL)
    message = chat(scripted.openai, tools=TOOLS).choices[0].message
    assert (message.role, message.content, message.reasoning) == ("assistant", "So.", "A city.")
    with scripted.openai.chat.completions.stream(model="story", messages=MESSAGES, tools=TOOLS) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in events and "tool_calls.function.arguments.done" in events
    assert final.message.content == "So." and final.finish_reason == "tool_calls"
    assert final.message.tool_calls is not None and final.message.tool_calls[0].function.arguments == '{"city": "Oslo"}'


def test_frames_of_a_stream_are_small_and_the_same_as_the_first(scripted: Scripted) -> None:
    """A chunk of reasoning, of content and of arguments has nothing but that."""
    scripted.says("<think>", "a", 'b"', "c</think>", "d", "e", "f", *CALL_IN_TWO)
    deltas = [chunk.choices[0].delta.to_dict() for chunk in chat(scripted.openai, tools=TOOLS, stream=True)]
    assert deltas[:4] == [
        {"role": "assistant", "content": ""},
        {"reasoning": "a", "reasoning_content": "a"},
        {"reasoning": 'b"', "reasoning_content": 'b"'},
        {"reasoning": "c", "reasoning_content": "c"},
    ]
    assert deltas[4:7] == [{"content": "d"}, {"content": "e"}, {"content": "f"}]
    [begun] = deltas[7].pop("tool_calls")
    assert deltas[7] == {} and begun["function"] == {"name": "weather", "arguments": '{"city": "Oslo"'}
    assert deltas[8] == {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}


def test_the_end_of_a_length_is_a_length(scripted: Scripted) -> None:
    scripted.says(CALL_IN_TWO[0], finish_reason="length")
    answer = chat(scripted.openai, tools=TOOLS).choices[0]
    assert answer.finish_reason == "length" and answer.message.tool_calls[0].function.arguments == '{"city": "Oslo"'


def test_one_call_at_most(scripted: Scripted) -> None:
    scripted.says(f"{CALL}\n{CALL}")
    for choice, more in ("auto", {"parallel_tool_calls": False}), (NAMED, {}):
        calls = chat(scripted.openai, tools=TOOLS, tool_choice=choice, **more).choices[0].message.tool_calls
        assert len(calls) == 1
    assert len(chat(scripted.openai, tools=TOOLS).choices[0].message.tool_calls) == 2


def test_the_choice_none_shows_no_tools_and_reads_no_calls(scripted: Scripted) -> None:
    script = scripted.says(CALL)
    answer = chat(scripted.openai, tools=TOOLS, tool_choice="none").choices[0]
    assert answer.message.content == CALL and answer.message.tool_calls is None and answer.finish_reason == "stop"
    assert "weather" not in script.prompt
    chat(scripted.openai, tools=TOOLS)
    shown = [json.loads(line) for line in script.prompt.splitlines() if line.startswith("{")]
    assert shown == [
        WEATHER,
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
    ]


def test_tokenize_counts_tools(scripted: Scripted) -> None:
    ask = {"messages": MESSAGES}, {"messages": MESSAGES, "tools": TOOLS}
    without, with_tools = (scripted.http.post("http://test/tokenize", json=body).json()["tokens"] for body in ask)
    script = scripted.says("Hello.")
    chat(scripted.openai, tools=TOOLS)
    assert scripted.engine.tokenizer.decode(with_tools, False) == script.prompt and len(with_tools) > len(without)


def test_calls_of_strict_tools_have_a_grammar(scripted: Scripted) -> None:
    script = scripted.says("Hello.")
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    assert chat(scripted.openai, tools=[strict]).choices[0].message.content == "Hello."
    assert script.params.structured_outputs is not None and "strict" not in script.prompt


def test_an_answer_with_a_structure_may_come_in_place_of_calls(scripted: Scripted) -> None:
    """As agents ask whose loop of calls ends with an object."""
    script = scripted.says("{}")
    wanted: Any = {"type": "json_object"}
    answer = chat(scripted.openai, tools=TOOLS, response_format=wanted).choices[0]
    assert answer.message.content == "{}" and answer.finish_reason == "stop"
    grammar = str(script.params.structured_outputs and script.params.structured_outputs.grammar)
    assert "structured" in grammar and "weather" in grammar
    scripted.says(CALL)
    answer = chat(scripted.openai, tools=TOOLS, response_format=wanted).choices[0]
    assert answer.message.tool_calls[0].function.name == "weather" and answer.finish_reason == "tool_calls"
    script = scripted.says(CALL)
    chat(scripted.openai, tools=TOOLS, response_format=wanted, tool_choice="required")
    assert "structured" not in str(script.params.structured_outputs)
    script = scripted.says("{}")
    chat(scripted.openai, tools=TOOLS, response_format=wanted, tool_choice="none")
    assert "weather" not in str(script.params.structured_outputs)


def test_markers_that_are_special_tokens_are_seen() -> None:
    from tokenizers import AddedToken

    tokenizer = Tokenizer(EMBEDDED_MODEL)
    tokenizer.fast.add_special_tokens([AddedToken("<tool_call>", special=True)])
    scripted = Scripted(TEMPLATE, tokenizer)
    script = scripted.says("Hello.")
    for more, hidden in ({}, True), ({"tools": TOOLS}, False), ({"tools": TOOLS, "tool_choice": "none"}, True):
        chat(scripted.openai, **more)
        assert script.params.skip_special_tokens == hidden


def test_history_reaches_the_template(scripted: Scripted) -> None:
    script = scripted.says("Hello.")
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    history: Any = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
        {"role": "assistant", "content": "Rain.", "tool_calls": [], "reasoning": "So."},
        {"role": "user", "content": "Thanks."},
    ]
    chat(scripted.openai, messages=history)
    assert '<tool_call>weather {"city": "Oslo"}</tool_call>' in script.prompt and "<think>Hm.</think>" in script.prompt
    assert "<|tool call_1|>\nrain\n" in script.prompt and "<think>So.</think>Rain.\n" in script.prompt


@pytest.mark.parametrize(
    ("more", "param", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": NAMED}, "tool_choice", "not in tools"),
        ({"tools": [NOW], "tool_choice": NAMED}, "tool_choice", "'weather'"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "or 'required'"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "function"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "required"),
        ({"tools": [NOW] * 200}, "tools", "128"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools.0.function.parameters", "of an object",
        ),
        (
            {
                "tools": [NOW, {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tools.1.function.parameters", '"not"',
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"title": "\ud83d"}}}]},
            "tools.0.function.parameters", "surrogate",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": DEEP}}}]},
            "tools.0.function.parameters", "100 levels deep",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"title": "x" * 2**16}}}] * 2,
            },
            "tools", "max_model_len=4096",
        ),
        ({"tools": TOOLS, "response_format": NO_FORMAT}, "response_format", "response_format cannot be enforced"),
        ({"tools": TOOLS, "structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex", "look-around"),
        ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos", "ignore_eos must be"),
        ({"functions": [{"name": "f"}]}, "functions", "would change the answer"),
        (
            {"messages": [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}]},
            "messages.0.tool_calls", "only an assistant",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages", "arguments must be an object",
        ),
        ({"messages": [{"role": "tool", "tool_call_id": "x"}]}, "messages.0.content", "required"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_name(scripted: Scripted, more: Any, param: str, message: str) -> None:
    body = json.dumps({"messages": MESSAGES} | more)  # in ASCII, with half a surrogate pair
    answer = scripted.http.post("/chat/completions", content=body, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and message in error["message"], error


def test_a_model_without_a_format_is_only_forced(served: Served) -> None:
    def ask(**more: Any) -> httpx.Response:
        return httpx.post(f"{served.url}/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1} | more)

    error = ask(tools=TOOLS).json()["error"]
    assert error["param"] == "tools" and "the chat template" in error["message"]
    assert "--tool-parser of the model" in error["message"]
    assert ask(tools=TOOLS, tool_choice="none").status_code == ask(tools=[], tool_choice="auto").status_code == 200


def test_the_operator_may_name_the_formats() -> None:
    llama = Scripted("{% for m in messages %}{{ m.content }}{% endfor %}", tool_parser="llama3_json")
    script = llama.says('{"name": "weather", "parameters": {"city": "Rome"}}')
    assert chat(llama.openai, tools=TOOLS).choices[0].message.tool_calls[0].function.arguments == '{"city": "Rome"}'
    assert "weather" not in script.prompt  # which this template has no place for
    with pytest.raises(openai.BadRequestError, match="response_format cannot be combined with tools") as refused:
        chat(llama.openai, tools=TOOLS, response_format={"type": "json_object"})
    assert refused.value.param == "response_format"
    long: Any = {"type": "function", "function": {"name": "f", "parameters": {"title": "x" * 2**16}}}
    with pytest.raises(openai.BadRequestError, match="more than 131072") as refused:
        chat(llama.openai, tools=[long, long], tool_choice="required")
    assert refused.value.param == "tools"
    off = Scripted(TEMPLATE, tool_parser="none", reasoning_parser="none")
    off.says("<think>a</think>b")
    assert chat(off.openai).choices[0].message.content == "<think>a</think>b"
    error = off.http.post("/chat/completions", json={"messages": MESSAGES, "tools": TOOLS}).json()["error"]
    assert error["param"] == "tools" and "started with --tool-parser none" in error["message"]
    assert "template" not in error["message"]
    always = Scripted("{% for m in messages %}{{ m.content }}{% endfor %}", reasoning_parser="deepseek_r1")
    always.says("a</think>b")
    assert plain(chat(always.openai).choices[0].message) == {"content": "b", "reasoning": "a", "tool_calls": []}


# --- reasoning -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "text", "reasoning", "content"),
    [
        ({}, "<think>\na\n</think>\n\nb", "a", "b"),
        ({}, "b <think>", "", "b <think>"),
        ({"enable_thinking": False}, "<think>b</think>", "", "<think>b</think>"),  # the prompt has an empty block
        ({"open": True}, "a\n</think>\n\nb", "a", "b"),
        ({"open": True}, "a", "a", ""),
    ],
)
def test_reasoning_by_what_the_prompt_ends_with(
    scripted: Scripted, variables: Any, text: str, reasoning: str, content: str
) -> None:
    scripted.says(*text)
    more: Any = {"extra_body": {"chat_template_kwargs": variables}}
    message = plain(chat(scripted.openai, **more).choices[0].message)
    assert message == {"content": content, "reasoning": reasoning, "tool_calls": []}
    assert joined(chat(scripted.openai, stream=True, **more))[0][0] == message


def test_a_continued_message_is_after_its_reasoning_or_inside_it(scripted: Scripted) -> None:
    scripted.says("a</think>b")
    for begun, reasoning, content in ("So,", "", "a</think>b"), ("<think>Hm,", "a", "b"):
        messages = [*MESSAGES, {"role": "assistant", "content": begun}]
        more: Any = {"extra_body": {"add_generation_prompt": False, "continue_final_message": True}}
        answer = plain(chat(scripted.openai, messages=messages, **more).choices[0].message)
        assert (answer["reasoning"], answer["content"]) == (reasoning, content)


def test_structured_outputs_come_after_reasoning(scripted: Scripted) -> None:
    script = scripted.says("{}")
    for variables, thinks in ({}, True), ({"open": True}, True), ({"enable_thinking": False}, False):
        body: Any = {"chat_template_kwargs": variables}
        chat(scripted.openai, response_format={"type": "json_object"}, extra_body=body)
        assert script.params.structured_outputs is not None
        assert ("</think>" in str(script.params.structured_outputs.grammar)) == thinks
