"""Tools, calls and their results reach the model as its template wants them. The truth is `apply_chat_template`."""

import json
from typing import Any

import pytest

from nanovllm.text.chat import ChatTemplate, as_parts, num_characters
from tests.engine.test_chat import hf, user

# Of each family what concerns tools, written as the family writes it.
QWEN = r"""
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n<tools>' }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if CONTENT and message.role != "tool" %}
        {{- '<|im_start|>' + message.role + '\n' + message.content }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response>' }}
    {%- endif %}
    {%- for tool_call in message.tool_calls or [] %}
        {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
        {{- '\n<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
        {{- ARGUMENTS }}
        {{- '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
AS_JSON = "tool_call.arguments | tojson"
QWEN_2 = QWEN.replace("CONTENT", "message.content").replace("ARGUMENTS", AS_JSON)
EITHER = f"tool_call.arguments if tool_call.arguments is string else {AS_JSON}"
QWEN_3 = QWEN.replace("CONTENT", "true").replace("ARGUMENTS", EITHER)  # adds the content, and so wants one
LLAMA_3 = r"""
{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|header|>' + message['role'] + '\n\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("single tool-calls only!") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|header|>assistant\n\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- '}<|eot_id|>' }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|header|>ipython\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant\n\n' }}{%- endif %}"""
# As models distilled from DeepSeek R1: arguments are added as JSON, and only a content of None makes a call.
R1 = r"""
{%- for message in messages %}
    {%- if message['role'] == 'assistant' and message['content'] is none %}
        {%- for tool in message['tool_calls'] %}
            {{- '<|call|>' + tool['type'] + '<|sep|>' + tool['function']['name'] + '\n' }}
            {{- tool['function']['arguments'] + '<|end|>' }}
        {%- endfor %}
    {%- elif message['role'] == 'tool' %}{{- '<|output|>' + message['content'] + '<|end|>' }}
    {%- else %}{{- '<|' + message['role'] + '|>' + message['content'] }}
    {%- endif %}
{%- endfor %}"""
# As Mistral's: strict about who speaks when, and about the ids of calls.
MISTRAL = r"""
{%- set ns = namespace(index=0) %}
{%- for m in messages if (m.role == 'user' or m.role == 'assistant') and not m.tool_calls %}
    {%- if (m.role == 'user') != (ns.index % 2 == 0) %}{{- raise_exception('must alternate!') }}{%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.index <= 1 %}{{- '[TOOLS]' }}{{- tools | tojson }}{{- '[/TOOLS]' }}{%- endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS]' }}
        {%- for call in message.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}{{- raise_exception('nine!') }}{%- endif %}
            {{- call.function | tojson }}{{- call.id }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.content | string + message.tool_call_id }}
    {%- else %}{{- message.content }}
    {%- endif %}
{%- endfor %}"""
FAMILIES = {"Qwen 2.5": QWEN_2, "Qwen 3": QWEN_3, "Llama 3": LLAMA_3, "Mistral": MISTRAL}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_kite",
            "description": "Where is the kite? Wo? 🪁",
            "parameters": {"type": "object", "properties": {"colour": {"type": "string"}}, "required": ["colour"]},
        },
    }
]
ARGUMENTS = {"colour": "röd 🦊", "n": [1, None]}
ANSWER = {"role": "tool", "tool_call_id": "abcdefghi", "name": "find_kite", "content": "in the tree"}


def call(arguments: Any = ARGUMENTS, **more: Any) -> dict[str, Any]:
    function = {"name": "find_kite", "arguments": arguments}
    return {"role": "assistant", **more, "tool_calls": [{"type": "function", "id": "abcdefghi", "function": function}]}


def expected(template: Any, messages: Any, tools: Any = None) -> str:
    text: str = hf(template).apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    return text


@pytest.mark.parametrize("family", FAMILIES)
def test_tools_and_calls_are_those_of_transformers(family: str) -> None:
    """With content of any kind or none, and arguments as an object or as JSON."""
    template = FAMILIES[family]
    chat = ChatTemplate(hf(template))
    conversations: list[tuple[Any, Any]] = [
        ([user("Where?")], TOOLS),
        ([user("Where?"), call(content=""), ANSWER], TOOLS),
        ([user("Where?"), call(content="Well."), ANSWER | {"content": as_parts("in the tree")}], None),
    ]
    for messages, tools in conversations:
        flat = [m | {"content": m["content"][0]["text"]} if isinstance(m["content"], list) else m for m in messages]
        text = expected(template, flat, tools)
        assert ("Wo? 🪁" in text) == bool(tools)
        assert chat.render(messages, tools=tools) == text
    whole = expected(template, [user("Where?"), call(content=""), ANSWER], TOOLS)
    assert "in the tree" in whole and "röd 🦊" in whole
    for arguments in ARGUMENTS, json.dumps(ARGUMENTS):
        for content in {}, {"content": None}, {"content": ""}:
            said = [user("Where?"), call(arguments, **content), ANSWER]
            assert chat.render(said, tools=TOOLS) == whole


def test_a_call_without_arguments_is_one_with_an_empty_object() -> None:
    for nothing in "{}", "", None, dict[str, int]():
        assert '"arguments": {}}' in ChatTemplate(hf(QWEN_2)).render([user("x"), call(nothing), ANSWER])


def test_a_template_that_adds_arguments_gets_json_and_none_for_no_content() -> None:
    for arguments, shown in (ARGUMENTS, json.dumps(ARGUMENTS)), ('{"a":1}', '{"a":1}'):
        text = ChatTemplate(hf(R1)).render([user("Where?"), call(arguments), ANSWER])
        assert text == f"<|user|>Where?<|call|>function<|sep|>find_kite\n{shown}<|end|><|output|>in the tree<|end|>"
    printed = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}"
    chat = ChatTemplate(hf(printed + "{% endfor %}{% endfor %}"))
    assert chat.render([user("Where? "), call({"a": "b"})]) == 'Where? {"a": "b"}', "not as Python shows a dict"


def test_a_template_for_tools_is_used_where_there_are_tools() -> None:
    templates = {"default": "{% for m in messages %}{{ m.content }}{% endfor %}", "tool_use": QWEN_2}
    chat = ChatTemplate(hf(templates))
    assert chat.render([user("Where?")]) == "Where?" == chat.render([user("Where?")], tools=[])
    assert chat.render([user("Where?")], tools=TOOLS) == expected(templates, [user("Where?")], TOOLS)


def refused(messages: Any, tools: Any = None, template: str = QWEN_2) -> str:
    with pytest.raises(ValueError) as caught:
        ChatTemplate(hf(template)).render(messages, tools=tools)
    return str(caught.value)


def test_what_a_template_would_leave_out_is_refused_by_name() -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert "no place for tools, which would be lost" in refused([user("x")], TOOLS, plain)
    assert "no place for tool_calls, which would be lost" in refused([user("x"), call()], None, plain)
    assert "single tool-calls only!" in refused(
        [user("x"), call() | {"tool_calls": call()["tool_calls"] * 2}], None, LLAMA_3
    )


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "user", "content": "x", "tool_calls": [{}]}, "messages[0]['tool_calls']: only an assistant"),
        ({"role": "assistant"}, "messages[0] must have 'role' and 'content'"),
        ({"role": "assistant", "tool_calls": []}, "messages[0] must have 'role' and 'content'"),
        ({"role": "assistant", "tool_calls": "x"}, "messages[0]['tool_calls'] must be a list"),
        ({"role": "assistant", "tool_calls": ["x"]}, "messages[0]['tool_calls'][0] must be like"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}, "['tool_calls'][0] must be like"),
        (call("{"), "messages[0]['tool_calls'][0]: the arguments must be an object"),
        (call("[1]"), "the arguments must be an object"),
        (call([1]), "the arguments must be an object"),
        (call({"x": "\ud800"}), "half a surrogate pair"),
        (ANSWER | {"content": None}, "messages[0]['content'] must be a string"),
        (ANSWER | {"content": {"x": 1}}, "messages[0]['content'] must be a string"),
    ],
)
def test_what_is_no_call_is_refused_by_name(message: Any, told: str) -> None:
    assert told in refused([message])


def test_what_is_no_tool_is_refused_by_name() -> None:
    for tool in "x", {"name": "f"}, {"type": "function", "function": {"name": 1}}:
        assert "tools[1] must be like {'type': 'function'" in refused([user("x")], [*TOOLS, tool])


def test_calls_count_for_the_length_of_a_message() -> None:
    assert num_characters(call({"x": "y" * 1000})) > 1000
    assert num_characters(call({"x": "y" * 1000}, content="z" * 1000)) > 2000
