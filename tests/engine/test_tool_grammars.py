"""Grammars that force tool calls, and such that let a model think or write first."""

import json
import random
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from nanovllm.llm import EMBEDDED_MODEL
from nanovllm.structured_outputs import StructuredOutputsParams
from nanovllm.text.grammars import TokenGrammars
from nanovllm.text.parts import Answer
from nanovllm.text.reasoning import Beginning
from nanovllm.text.tokenizer import Tokenizer
from nanovllm.text.tool_calls import HERMES, LLAMA3_JSON, ToolCallSplitter, ToolFormat
from nanovllm.text.tool_grammars import AnswerGrammar, Tool

EOS, SIZE = 0, 4096
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "$defs": {"City": {"enum": ["Oslo", "Rome"]}},
}
ODD = 'now "ü" %llguidance'
TOOLS = [Tool("weather", CITY), Tool(ODD, {"properties": {}, "description": "%llguidance {}"})]
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now \\"ü\\" %llguidance", "arguments": {}}\n</tool_call>'
WRONG = WEATHER.replace("Oslo", "Bonn")
LLAMA = '{"name": "weather", "parameters": {"city": "Rome"}}'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(EMBEDDED_MODEL)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> TokenGrammars:
    return TokenGrammars(tokenizer, SIZE, {EOS})


def accepts(grammars: TokenGrammars, params: StructuredOutputsParams, text: str) -> bool:
    """Whether an output may be exactly this text."""
    ids = [*grammars.tokenizer.encode(text, False), EOS]
    return grammars.compile(params).num_valid(ids) == len(ids)


def calls(
    required: bool,
    one: bool = False,
    form: ToolFormat = HERMES,
    begins: Beginning | None = None,
    tools: list[Tool] = TOOLS,
    special: dict[str, int] | None = None,
) -> StructuredOutputsParams:
    return AnswerGrammar(special or {}, begins).of_calls(form, tools, required, one)


def test_required_calls(grammars: TokenGrammars) -> None:
    for text in WEATHER, NOW, f"{WEATHER}\n{NOW}\n{WEATHER}":
        assert accepts(grammars, calls(required=True), text)
    for text in "", "Hello", WRONG, f"{WEATHER}\nHello", NOW.replace("{}", '{"x": 1}'), f"<think>a</think>{WEATHER}":
        assert not accepts(grammars, calls(required=True), text)
    one = calls(required=True, one=True)
    assert accepts(grammars, one, NOW) and not accepts(grammars, one, f"{NOW}\n{NOW}")


def test_required_calls_of_llama(grammars: TokenGrammars) -> None:
    params = calls(required=True, form=LLAMA3_JSON)
    assert accepts(grammars, params, LLAMA) and accepts(grammars, params, f"{LLAMA}; {LLAMA}")
    assert not accepts(grammars, params, "Hello") and not accepts(grammars, params, LLAMA.replace("Rome", "Bonn"))


@pytest.mark.parametrize("special", [False, True])
def test_free_calls_match_where_the_tool_is_strict(special: bool) -> None:
    """With markers that are texts, and with markers that are tokens which a text never is."""
    tokenizer = Tokenizer(EMBEDDED_MODEL)
    ids: dict[str, int] = {}
    if special:
        markers = "<tool_call>", "</tool_call>", "<think>", "</think>"
        tokenizer.fast.add_special_tokens([AddedToken(text, special=True) for text in markers])
        ids = {text: tokenizer.fast.token_to_id(text) for text in markers}
    grammars = TokenGrammars(tokenizer, SIZE + 4, {EOS})
    for strict in True, False:
        params = calls(required=False, tools=[Tool("weather", CITY, strict)], special=ids)
        for text in "Hello <tool> you", WEATHER, f"Well.\n{WEATHER}", f"{WEATHER}\n{WEATHER} so", "":
            assert accepts(grammars, params, text), text
        for text in WRONG, f"a{WEATHER} b {WRONG}":
            assert accepts(grammars, params, text) != strict
        assert not accepts(grammars, params, f"a{NOW}") and not accepts(grammars, params, "a <tool_call> b")
    thoughtful = calls(required=True, begins="before", special=ids)
    for text, good in ((f"<think>\nhm <b>\n</think>\n\n{WEATHER}", True), (WEATHER, True), ("<think>a</think>", False)):
        assert accepts(grammars, thoughtful, text) == good
    opened = calls(required=True, begins="inside", special=ids)
    assert accepts(grammars, opened, f"hm\n</think>\n\n{WEATHER}") and not accepts(grammars, opened, WEATHER)
    one = calls(required=False, one=True, tools=[Tool("weather", CITY, True)], special=ids)
    assert accepts(grammars, one, f"a{WEATHER}") and accepts(grammars, one, "Hello")
    assert not accepts(grammars, one, f"a{WEATHER}\n{WEATHER}") and not accepts(grammars, one, WRONG)


def test_free_calls_of_llama(grammars: TokenGrammars) -> None:
    params = calls(required=False, form=LLAMA3_JSON, tools=[Tool("weather", CITY, True)])
    for text in "Hello {you}", LLAMA, f"<|python_tag|>{LLAMA}; {LLAMA}":
        assert accepts(grammars, params, text)
    assert not accepts(grammars, params, LLAMA.replace("Rome", "Bonn"))


OUTPUTS: Any = pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}, '{"a": 1}'),
        ({"json_object": True}, "{}"),
        ({"regex": "[}{/]+b"}, "}/{b"),
        ({"choice": ["yes", "n}o"]}, "n}o"),
        ({"grammar": 'start: "{" b\nb: /x+/ "}"'}, "{xx}"),
        ({"grammar": 'root ::= "a" root | "b"'}, "aab"),
    ],
)


@OUTPUTS
def test_every_structured_output_may_come_after_reasoning(
    grammars: TokenGrammars, wanted: dict[str, Any], text: str
) -> None:
    params = StructuredOutputsParams(**wanted)
    assert AnswerGrammar({}, None).of_answer(params) is params is AnswerGrammar({}, "after").of_answer(params)
    before, inside = AnswerGrammar({}, "before").of_answer(params), AnswerGrammar({}, "inside").of_answer(params)
    assert accepts(grammars, before, text) and accepts(grammars, before, f"<think>hm {{</think>\n\n{text}")
    assert accepts(grammars, inside, f"hm</think>{text}") and not accepts(grammars, inside, text)
    assert not accepts(grammars, before, "Hello")


@OUTPUTS
def test_every_structured_output_may_come_in_place_of_calls(
    grammars: TokenGrammars, wanted: dict[str, Any], text: str
) -> None:
    wish, tools = StructuredOutputsParams(**wanted), [Tool("weather", CITY, strict=True)]
    either = AnswerGrammar({}, None).of_calls(HERMES, tools, False, False, wish)
    for good in text, WEATHER, f"{WEATHER}\n{WEATHER}":
        assert accepts(grammars, either, good), good
    for bad in "Hello", WRONG, f"{WEATHER}\n{text}", f"Hello\n{WEATHER}":
        assert not accepts(grammars, either, bad), bad
    one = AnswerGrammar({}, "before").of_calls(HERMES, tools, False, True, wish)
    for good in text, WEATHER:
        assert accepts(grammars, one, good) and accepts(grammars, one, f"<think>hm {{</think>\n\n{good}")
    assert not accepts(grammars, one, f"{WEATHER}\n{WEATHER}")
    assert not accepts(grammars, AnswerGrammar({}, None).of_calls(HERMES, tools, True, False, wish), text)


@pytest.mark.parametrize(
    ("parameters", "good", "bad"),
    [
        ({}, '{"x": [1]}', "5"),
        ({"properties": {}}, "{}", '{"x": 1}'),
        ({"properties": {"a": {}}, "additionalProperties": True}, '{"b": 1}', "[]"),
        ({"anyOf": [{"properties": {"a": {"type": "null"}}, "required": ["a"]}]}, '{"a": null}', "{}"),
    ],
)
def test_arguments_are_an_object_without_unnamed_properties(
    grammars: TokenGrammars, parameters: dict[str, Any], good: str, bad: str
) -> None:
    params = calls(required=True, tools=[Tool("f", parameters)])
    for arguments, fits in (good, True), (bad, False):
        text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        assert accepts(grammars, params, text) == fits


@pytest.mark.parametrize("form", [HERMES, LLAMA3_JSON])
def test_whatever_a_grammar_allows_is_a_call_that_parses(grammars: TokenGrammars, form: ToolFormat) -> None:
    """Random tokens, as a model without sense would choose them."""
    params = calls(required=True, form=form)
    draw, found = random.Random(1), set[str]()
    for _ in range(8):
        matcher, ids = grammars.compile(params), list[int]()
        while not ids or ids[-1] != EOS:
            mask = np.empty((1, -(-grammars.vocab_size // 32)), dtype=np.int32)
            grammars.fill([(matcher, ())], mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            ids.append(EOS if EOS in allowed and draw.random() < 0.7 else draw.choice(allowed))
            assert matcher.accept(ids[-1]) is None and len(ids) < 1000
        parts = Answer([ToolCallSplitter(form)]).feed(grammars.tokenizer.decode(ids[:-1]), last=True)
        assert {part.kind for part in parts} == {"call", "arguments"}
        for part in parts:
            found.add(part.text)
            assert part.kind == "call" or json.loads(part.text) in ({"city": "Oslo"}, {"city": "Rome"}, {})
    assert {"weather", ODD, "{}"} <= found
