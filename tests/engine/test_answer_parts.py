"""Content, reasoning and tool calls in a text, whole and in pieces: nothing lost, and no half marker shown."""

import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanovllm.text.parts import Answer, Part, Splitter, joined, unsettled
from nanovllm.text.reasoning import Beginning, ReasoningSplitter, beginning, reasoning_parser
from nanovllm.text.tool_calls import HERMES, LLAMA3_JSON, ToolCallSplitter, ToolFormat, tool_format

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": [1, {"a": "}\\""}]}}\n</tool_call>'
ARGUMENTS = '{"city": "Oslo", "days": [1, {"a": "}\\""}]}'
LLAMA = '{"name": "weather", "parameters": {"city": "Oslo"}}'
FRAGMENTS = [
    CALL, LLAMA, "<tool_call>", "</tool_call>", "<|python_tag|>", "<think>", "</think>", "<think>\n\n</think>\n\n",
    '{"name": "now", "arguments": {}}', '{"arguments": {"x": 1}, "name": "late"}', '{"name": "no", "arguments": 5}',
    '{"type": "function", "name": "typed", "parameters": {"x": "ü🦊"}}', '{"name": "cut", "arguments": {"x": "',
    '{"name": "bad", "arguments": {"x": 1]', '{"other": 1}', '{"name"\u00a0: "space"',
    '{"name": "\\ud800", "arguments": {}}', '{"name": "more", "arguments": {}, "id": 1}',
    '{"name": "quoted", "arguments": "{\\"x\\": 1}"}', "\n", "hello", " ", "; ", "}", "{", '"', "<", "<tool", "ü🦊",
]  # fmt: skip


def content(text: str) -> Part:
    return Part("content", text)


def call(number: int, name: str, arguments: str) -> list[Part]:
    return [Part("call", name, number), Part("arguments", arguments, number)]


def split(pieces: Sequence[str], *splitters: Splitter) -> list[Part]:
    answer = Answer(splitters)
    return [part for i, piece in enumerate(pieces) for part in answer.feed(piece, i == len(pieces) - 1)]


def calls_in(text: str, form: ToolFormat = HERMES, one: bool = False) -> list[Part]:
    return split([text], ToolCallSplitter(form, one))


def reasoning_in(text: str, begins: Beginning) -> list[tuple[str, str]]:
    return [(part.kind, part.text) for part in split([text], ReasoningSplitter(begins))]


# --- tool calls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Hello.\n", [content("Hello.\n")]),
        (CALL, call(0, "weather", ARGUMENTS)),
        (f"Let me see.\n\n{CALL}\n", [content("Let me see."), *call(0, "weather", ARGUMENTS)]),
        (f"{CALL}\n{CALL}", [*call(0, "weather", ARGUMENTS), *call(1, "weather", ARGUMENTS)]),
        (f"{CALL}\nDone.", [*call(0, "weather", ARGUMENTS), content("Done.")]),
        ('<tool_call>{"name":"now","arguments":{}}</tool_call>', call(0, "now", "{}")),
        ('<tool_call>{"arguments": {"x": "ü"}, "name": "f"}</tool_call>', call(0, "f", '{"x": "ü"}')),
        ('<tool_call>{"name": "a \\"b", "arguments": {}}</tool_call>', call(0, 'a "b', "{}")),
        # The object as a string, as OpenAI's own JSON has it.
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": \\"ü\\"}"}</tool_call>', call(0, "f", '{"x": "ü"}')),
        # Other keys behind the arguments, whole and cut off.
        (
            '<tool_call>{"name": "f", "arguments": {"x": 1}, "id": "a}", "more": [{}]}</tool_call>Done.',
            [*call(0, "f", '{"x": 1}'), content("Done.")],
        ),
        ('<tool_call>{"name": "f", "arguments": {}\n, "id": "a"</tool_call>', call(0, "f", "{}")),
        ('<tool_call>{"name": "f", "arguments": {}, "id": "a', call(0, "f", "{}")),
        # What models forget: the marker, the brace, both.
        ('<tool_call>{"name": "f", "arguments": {"x": 1}}', call(0, "f", '{"x": 1}')),
        ('<tool_call>{"name": "f", "arguments": {"x": 1}</tool_call>', call(0, "f", '{"x": 1}')),
        ('<tool_call>{"name": "f", "arguments": {"x": 1</tool_call>', call(0, "f", '{"x": 1')),
        (
            '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g", "arguments": {}}',
            [*call(0, "f", "{}"), *call(1, "g", "{}")],
        ),
        # A marker in a string is none.
        (
            '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>',
            call(0, "f", '{"x": "</tool_call>"}'),
        ),
    ],
)
def test_calls_of_hermes(text: str, parts: list[Part]) -> None:
    assert calls_in(text) == parts


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (LLAMA, call(0, "weather", '{"city": "Oslo"}')),
        (f"<|python_tag|>{LLAMA}", call(0, "weather", '{"city": "Oslo"}')),
        (f"Well: <|python_tag|>{LLAMA}", [content("Well:"), *call(0, "weather", '{"city": "Oslo"}')]),
        (
            f'{LLAMA}; {{"type": "function", "name": "g", "parameters": {{}}}}',
            [*call(0, "weather", '{"city": "Oslo"}'), *call(1, "g", "{}")],
        ),
        ('{"name": "f", "parameters": {}, "id": 1}; Done.', [*call(0, "f", "{}"), content("; Done.")]),
        ('{"name": "f", "parameters": {}, ' + LLAMA, [*call(0, "f", "{}"), *call(1, "weather", '{"city": "Oslo"}')]),
        (f"I would call {LLAMA}", [content(f"I would call {LLAMA}")]),
        ('{"answer": {"name": "x"}}', [content('{"answer": {"name": "x"}}')]),
        ('<|python_tag|>brave_search.call(query="x")', [content('<|python_tag|>brave_search.call(query="x")')]),
        (f"{LLAMA}; and", [*call(0, "weather", '{"city": "Oslo"}'), content("; and")]),
    ],
)
def test_calls_of_llama(text: str, parts: list[Part]) -> None:
    assert calls_in(text, LLAMA3_JSON) == parts


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>", "a <tool_cal", "<tool_call>\nweather(Oslo)\n</tool_call>",
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "argum', '<tool_call>{"arguments": {"x": 1}}</tool_call>', '<tool_call>["f", {}]',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "<tool_call> <tool_call>", "\n </tool_call> \n",
        '<tool_call>{"arguments": {"x": 1], "name": "f"}',
    ],
)  # fmt: skip
def test_what_is_no_call_is_content_to_the_last_character(text: str) -> None:
    assert calls_in(text) == [content(text)]


def test_a_call_after_what_is_none_is_found() -> None:
    assert calls_in(f"<tool_call>no\n{CALL}") == [content("<tool_call>no"), *call(0, "weather", ARGUMENTS)]


def test_arguments_and_names_come_as_early_as_possible() -> None:
    answer = Answer([ToolCallSplitter(HERMES)])
    seen = [answer.feed(c, last=False) for c in '<tool_call>{"name": "f", "arguments": {"x"']
    assert not any(seen[:-4]) and [part.text for parts in seen[-4:] for part in parts] == ["f", "{", '"', "x", '"']


def test_one_call_at_most() -> None:
    assert calls_in(f"a{CALL}{CALL}b", one=True) == [content("a"), *call(0, "weather", ARGUMENTS), content("b")]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("...within <tool_call></tool_call> XML tags...", HERMES),
        ("<tool_call>\n<function=name>", None),
        ("{{ '<|python_tag|>' }}", LLAMA3_JSON),
        ('Respond in the format {"name": function name, "parameters": dictionary', LLAMA3_JSON),
        ("{{ message.content }}", None),
    ],
)
def test_the_template_tells_the_format(template: str, form: ToolFormat | None) -> None:
    assert tool_format(template) == form


# --- reasoning -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "begins", "parts"),
    [
        ("<think>\nHm.\n</think>\n\nYes.\n", "before", [("reasoning", "Hm."), ("content", "Yes.\n")]),
        ("\n<think></think>Yes", "before", [("content", "Yes")]),
        ("Yes <think>no</think>", "before", [("content", "Yes <think>no</think>")]),
        ("<think>Hm", "before", [("reasoning", "Hm")]),
        ("<think>Hm</thin", "before", [("reasoning", "Hm</thin")]),
        ("<thi", "before", [("content", "<thi")]),
        ("Hm <think> </think>\n", "inside", [("reasoning", "Hm <think>")]),
        ("<think>Hm</think>a</think>", "inside", [("reasoning", "Hm"), ("content", "a</think>")]),
        ("<think>a</think>", "after", [("content", "<think>a</think>")]),
        ("", "inside", []),
    ],
)
def test_reasoning_is_split_off(text: str, begins: Beginning, parts: list[tuple[str, str]]) -> None:
    assert reasoning_in(text, begins) == parts


def test_where_an_output_begins() -> None:
    assert beginning("qwen3", "What is <think>?<|im_end|>\n<|im_start|>assistant\n") == "before"
    assert beginning("qwen3", "assistant\n<think>\n") == "inside"
    for parser in "qwen3", "deepseek_r1":
        assert beginning(parser, "assistant\n<think>\n\n</think>\n\n") == "after"
    assert beginning("deepseek_r1", "assistant\n") == "inside"
    assert reasoning_parser("{{ '<think>' }}") == "qwen3" and reasoning_parser("{{ 'I think' }}") is None


# --- in pieces -------------------------------------------------------------------------------------------------------

texts = st.lists(st.sampled_from(FRAGMENTS), max_size=7).map("".join)
cuts = st.lists(st.floats(0, 1), max_size=11)


def pieces_of(text: str, cut_at: Sequence[float]) -> list[str]:
    places = [0, *sorted(int(cut * len(text)) for cut in cut_at), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


@given(text=texts, cut_at=cuts, begins=st.sampled_from(["before", "inside", "after"]), bare=st.booleans())
@example(text=CALL, cut_at=[0.0, 0.01, 0.5], begins="before", bare=False)
@settings(max_examples=120)
def test_any_split_gives_the_same_parts(text: str, cut_at: list[float], begins: Beginning, bare: bool) -> None:
    def splitters() -> tuple[Splitter, ...]:
        return ReasoningSplitter(begins), ToolCallSplitter(LLAMA3_JSON if bare else HERMES)

    whole = split([text], *splitters())
    pieces = split(pieces_of(text, cut_at), *splitters())
    assert joined(pieces) == whole == joined(split(list(text) or [""], *splitters()))
    # Each call: first its name, then its arguments, and its number in order.
    numbers = [part.call for part in whole if part.kind == "call"]
    assert numbers == list(range(len(numbers)))
    for before, part in zip([content(""), *pieces], pieces, strict=False):
        assert part.text and (part.kind != "arguments" or before.call == part.call)


@given(text=texts, cut_at=cuts)
@settings(max_examples=80)
def test_nothing_is_lost(text: str, cut_at: list[float]) -> None:
    """But white space, and what the format has around names and arguments."""
    parts = split(pieces_of(text, cut_at), ToolCallSplitter(HERMES))
    place = 0
    for part in parts:
        for word in part.text.split() if part.kind == "content" else []:
            place = text.index(word, place) + len(word)
    shown = "".join(part.text for part in parts)
    for word in "hello", "ü🦊", "other", "no", "cut", "bad", "</think>":
        assert shown.count(word) == text.count(word), word


def test_only_what_may_become_a_marker_is_held_back() -> None:
    for text, held in ("abc", 0), ("abc ", 1), ("a \n<tool", 7), ("a<", 1), ("a<b", 0), ("<tool_call", 10):
        assert unsettled(text, "<tool_call>") == held
    answer = Answer([ToolCallSplitter(HERMES)])
    seen = [answer.feed(piece, last=False) for piece in ("a <", "tool", "box")]
    assert [[part.text for part in parts] for parts in seen] == [["a"], [], [" <toolbox"]]


@pytest.mark.parametrize("begin", ['{"name": "', "{", '{"type": "function", "', '{"name": "f", "arguments"'])
@pytest.mark.parametrize("more", ["aaaa", "    "])
def test_a_beginning_without_end_is_not_read_again_and_again(begin: str, more: str) -> None:
    """Otherwise each of these took seconds, in which other clients wait."""
    splitter, began = ToolCallSplitter(HERMES), time.process_time()
    for piece in HERMES.begin + begin, *[more] * 12_000:
        splitter.feed(piece)
    assert time.process_time() - began < 1


def test_a_call_with_a_very_long_name_is_a_call() -> None:
    name = "f" * 3000
    text = f'{HERMES.begin}{{"name": "{name}", "arguments": {{"a": 1}}}}{HERMES.end}'
    for pieces in [text], list(text):
        assert split(pieces, ToolCallSplitter(HERMES)) == call(0, name, '{"a": 1}')
