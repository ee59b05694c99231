"""Structured outputs without a model: what is refused and with which words, and which tokens may come next."""

import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from nanovllm import SamplingParams, StructuredOutputsParams
from nanovllm.text import grammars as module
from nanovllm.text.grammars import TokenGrammars, TokenMatcher
from nanovllm.text.tokenizer import Tokenizer

STORY_MODEL = Path(__file__).parents[2] / "assets" / "story_model"
EOS, OTHER_EOS, SIZE = 0, 5, 4096
PADDED = SIZE + 40  # ids of the model; the tokenizer has 4096


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(STORY_MODEL)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> TokenGrammars:
    return TokenGrammars(tokenizer, PADDED, {EOS, OTHER_EOS})


class PanicException(BaseException):
    """As PyO3 has it."""


@pytest.mark.parametrize(("raised", "seen"), [(PanicException, RuntimeError), (KeyboardInterrupt, KeyboardInterrupt)])
def test_a_panic_of_llguidance_is_an_error_that_somebody_catches(
    raised: Any, seen: Any, grammars: TokenGrammars
) -> None:
    with patch.object(grammars, "_compile", side_effect=raised("index out of bounds")), pytest.raises(seen) as caught:
        grammars.compile(StructuredOutputsParams(regex="never seen before"))
    assert "index out of bounds" in str(caught.value)


def compiled(grammars: TokenGrammars, **params: Any) -> TokenMatcher:
    return grammars.compile(StructuredOutputsParams(**params))


def filled(grammars: TokenGrammars, wanted: Sequence[tuple[TokenMatcher, Sequence[int]]]) -> bytes:
    """The masks, in memory where others stood before."""
    number = sum(len(guesses) + 1 for _, guesses in wanted)
    masks = np.random.default_rng(number).integers(-(2**31), 2**31, (number, -(-grammars.vocab_size // 32)), np.int32)
    grammars.fill(wanted, masks)
    return masks.tobytes()


def allowed(grammars: TokenGrammars, matcher: TokenMatcher, *guesses: int) -> list[set[int]]:
    """The ids of each mask."""
    words = np.frombuffer(filled(grammars, [(matcher, guesses)]), dtype=np.uint8)
    bits = np.unpackbits(words, bitorder="little").reshape(len(guesses) + 1, -1)
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def accept(grammars: TokenGrammars, matcher: TokenMatcher, text: str) -> None:
    for token in grammars.tokenizer.encode(text):
        assert token in allowed(grammars, matcher)[0], (text, token)
        assert matcher.accept(token) is None


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({}, ValueError, "exactly one of json, regex, choice, grammar, json_object; got none"),
        ({"json_object": False}, ValueError, "exactly one"),
        ({"json": {}, "regex": "a"}, ValueError, "exactly one"),
        ({"choice": []}, ValueError, "choice must not be empty"),
        ({"choice": ["a", ""]}, ValueError, "choice must not be empty"),
        ({"choice": "ab"}, TypeError, "choice must be a list of strings; got 'ab'"),
        ({"choice": ["a", 1]}, TypeError, "choice must be a list of strings"),
        ({"regex": ""}, ValueError, "regex must not be empty"),
        ({"grammar": ""}, ValueError, "grammar must not be empty"),
        ({"regex": 3}, TypeError, "regex must be a string; got 3"),
        ({"json": 3}, TypeError, "json must be a JSON schema, as a dict or as its text; got 3"),
        ({"json": "{"}, ValueError, "json must be a JSON schema"),
        ({"json": "3"}, ValueError, "json must be a JSON schema, which is an object"),
        ({"json": {"a": object()}}, ValueError, "json must be a JSON schema"),
        ({"json_object": 1}, TypeError, "json_object must be true or false; got 1"),
        ({"regex": "a" * 200_000}, ValueError, "200000 characters, more than 131072"),
        ({"choice": ["a" * 1000] * 200}, ValueError, "200000 characters"),
        ({"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "}, ValueError, "not both"),
        ({"json_object": True, "whitespace_pattern": ""}, ValueError, "use disable_any_whitespace"),
    ],
)
def test_what_makes_no_sense_is_refused_when_made(params: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match="structured_outputs") as caught:
        StructuredOutputsParams(**params)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"ignore_eos": True}, "ignore_eos must be False with structured_outputs"),
        ({"min_tokens": 2}, "min_tokens must be 0 with structured_outputs"),
    ],
)
def test_parameters_that_contradict_a_grammar(params: Any, message: str) -> None:
    structure = StructuredOutputsParams(regex="a+")
    with pytest.raises(ValueError, match=message):
        SamplingParams(structured_outputs=structure, **params)
    with pytest.raises(TypeError, match="structured_outputs must be StructuredOutputsParams or None"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def test_parameters_can_be_hashed_and_a_schema_keeps_its_order() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    one, other = StructuredOutputsParams(json=schema), StructuredOutputsParams(json=json.dumps(schema))
    assert one == other and len({one, other, StructuredOutputsParams(choice=["a"])}) == 2
    assert list(json.loads(str(one.json))["properties"]) == ["b", "a"] and one.kind == "json"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"json": {"properties": {"a": {"not": {}}}}}, 'json cannot be enforced: Unimplemented keys: ["not"]'),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"x-guidance": {"lenient": True}, "not": {}}}, "not"),
        ({"json": {"type": "sting"}}, "Invalid type: sting"),
        ({"json": {"type": "string", "format": "colour"}}, "Unknown format: colour"),
        ({"json": {"$ref": "#/nowhere"}}, "/nowhere"),
        ({"json": {"$ref": "https://example.org/schema"}}, "https://example.org/schema"),
        ({"json": {"enum": []}}, "anyOf is empty"),
        ({"json": {"$ref": "#"}}, "json cannot be enforced: no output matches it"),
        ({"json": {"type": "object"}, "whitespace_pattern": "("}, "unclosed group"),
        ({"regex": "(a|b"}, "regex cannot be enforced"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"\bfoo"}, "lookarounds not supported"),
        ({"regex": "()"}, "regex allows no output but the empty one"),
        ({"grammar": 'start: "a" | thing'}, 'unknown name: "thing"'),
        ({"grammar": 'begin: "a"'}, "no rule 'start:', as in Lark, so it was read as GBNF"),
        ({"grammar": "root ::= (("}, "read as GBNF, but: Expected ')'"),
        ({"grammar": "root ::= " + "(" * 20_000}, "recursion"),
        ({"grammar": '%llguidance {"no_forcing": false}\nstart: "a"'}, "%llguidance, which sets options"),
        ({"grammar": f"start: <[{SIZE + 1}]>"}, "allows no output but the empty one"),
    ],
)
def test_what_cannot_be_enforced_is_named(grammars: TokenGrammars, params: Any, message: str) -> None:
    with pytest.raises(ValueError, match="structured_outputs") as caught:
        compiled(grammars, **params)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_model_without_an_end_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="structured_outputs needs an EOS token"):
        compiled(TokenGrammars(tokenizer, SIZE, ()), regex="a")


def test_eos_ids_that_model_or_tokenizer_do_not_have_are_left_out(tokenizer: Tokenizer) -> None:
    nobodys = {-1, SIZE + 3, 99999}
    some = TokenGrammars(tokenizer, PADDED, {EOS, *nobodys})
    assert EOS in allowed(some, compiled(some, regex="a*"))[0]
    for vocab_size, ids in (PADDED, nobodys), (SIZE - 10, {SIZE - 5}):
        with pytest.raises(ValueError, match="structured_outputs needs an EOS token"):
            compiled(TokenGrammars(tokenizer, vocab_size, ids), regex="a")


CHOICES = ["a/b", "new\nline", "q\"uo'te", "é😀", "a.b*c", "^x$", "\\d", "a b", "{}[]", "#&-~", "%", "a", "a\\"]


@pytest.mark.parametrize("text", CHOICES)
def test_choices_are_texts_and_not_expressions(grammars: TokenGrammars, text: str) -> None:
    matcher = compiled(grammars, choice=CHOICES)
    accept(grammars, matcher, text)
    assert EOS in allowed(grammars, matcher)[0]


def test_eos_is_allowed_exactly_where_the_grammar_may_end(grammars: TokenGrammars) -> None:
    ends = {EOS, OTHER_EOS}
    matcher = compiled(grammars, regex="Tom(my)?|Anna")
    assert not allowed(grammars, matcher)[0] & ends
    accept(grammars, matcher, "Tom")
    assert allowed(grammars, matcher)[0] > ends, "both, and what may follow"
    accept(grammars, matcher, "my")
    assert allowed(grammars, matcher)[0] == ends
    assert matcher.accept(EOS) is None


@pytest.mark.parametrize("size", [SIZE - 10, 1001, PADDED])
def test_ids_that_model_or_tokenizer_do_not_have_are_never_allowed(tokenizer: Tokenizer, size: int) -> None:
    """A mask is as wide as the model's vocabulary, whatever the tokenizer has."""
    grammars, least = TokenGrammars(tokenizer, size, {EOS}, num_threads=1), min(SIZE, size)
    matcher = compiled(grammars, grammar=f"start: <[7]> | <[{least - 1}]> | <[{max(SIZE, size) - 1}]>")
    assert allowed(grammars, matcher) == [{7, least - 1}]


def test_lark_and_gbnf_are_told_apart(grammars: TokenGrammars) -> None:
    for grammar in ('start: "(" start ")" | "x"', 'root ::= "(" root ")" | "x"'):
        matcher = compiled(grammars, grammar=grammar)
        accept(grammars, matcher, "((x))")
        assert allowed(grammars, matcher)[0] == {EOS, OTHER_EOS}


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("options", "good", "bad"),
    [
        ({}, ['{"a":1}', '{\n    "a": 1\n}', '{"a"\t:1}'], ['{\n\n"a":1}', '{"a":' + " " * 21 + "1}"]),
        ({"disable_any_whitespace": True}, ['{"a":1}'], ['{"a": 1}', '{\n"a":1}']),
        ({"whitespace_pattern": " {2}"}, ['{"a":  1}'], ['{"a": 1}']),
    ],
)
def test_whitespace_of_json_is_bounded(
    grammars: TokenGrammars, options: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    for text, right in [(text, True) for text in good] + [(text, False) for text in bad]:
        tokens = grammars.tokenizer.encode(text)
        matcher = compiled(grammars, json=SCHEMA, **options)
        assert (matcher.num_valid([*tokens, EOS]) == len(tokens) + 1) == right, text


def test_masks_after_guesses(grammars: TokenGrammars) -> None:
    matcher = compiled(grammars, regex="(Tom|Anna) went home")
    text = grammars.tokenizer.encode("Tom went home")
    expected = []
    follower = matcher.copy()
    for token in [*text, EOS]:
        expected += allowed(grammars, follower)
        assert follower.accept(token) is None
    assert allowed(grammars, matcher, *text) == expected and matcher.num_valid(text) == len(text)
    # Behind a guess that is not possible nothing is ruled out, and nothing of the guesses is left behind.
    first, _, *rest = text
    assert allowed(grammars, matcher, first, first, *rest)[:2] == expected[:2]
    assert len(allowed(grammars, matcher, first, first, *rest)[-1]) == SIZE
    assert matcher.num_valid([first, first]) == 1
    assert allowed(grammars, matcher) == expected[:1]


def test_masks_of_many_outputs_are_those_of_each(grammars: TokenGrammars) -> None:
    kinds: list[dict[str, Any]] = [{"regex": "[a-c]+x"}, {"choice": ["Tom", "Anna"]}, {"json_object": True}]
    matchers = [compiled(grammars, **kind) for kind in kinds] * 5
    guesses: list[list[int]] = [[], [], list(grammars.tokenizer.encode("{"))] * 5
    alone = b"".join(filled(grammars, [one]) for one in zip(matchers, guesses, strict=True))
    assert filled(grammars, [*zip(matchers[:3], guesses[:3], strict=True)]) == alone[: len(alone) // 5]
    copies = [matcher.copy() for matcher in matchers]
    assert filled(grammars, [*zip(copies, guesses, strict=True)]) == alone


def test_a_copy_goes_its_own_way(grammars: TokenGrammars) -> None:
    matcher = compiled(grammars, choice=["Tom", "Anna"])
    accept(grammars, other := matcher.copy(), "Anna")
    accept(grammars, matcher, "Tom")
    assert allowed(grammars, other)[0] == {EOS, OTHER_EOS}
    for name in ("Anna", "Tom"):  # nor is what is kept moved on
        accept(grammars, compiled(grammars, choice=["Tom", "Anna"]), name)


def test_a_token_that_cannot_follow_is_an_error_for_good(grammars: TokenGrammars) -> None:
    matcher = compiled(grammars, regex="abc")
    refused = matcher.accept(EOS)
    assert refused is not None and refused.startswith("structured_outputs: the output cannot go on")
    assert matcher.accept(grammars.tokenizer.encode("a")[0]), "not taken for alive again"


def test_a_grammar_that_grows_too_complex_is_an_error(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the token that follows, where llguidance allows EOS alone, and would take it for the end."""
    monkeypatch.setitem(module.LIMITS, "max_lexer_states", 100)
    grammars = TokenGrammars(tokenizer, SIZE, {EOS}, num_threads=1)
    matcher = compiled(grammars, regex="(a|b)*a(a|b){20}c")
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    for token in [a, a, b, a, b, b, a, b] * 5:
        if allowed(grammars, matcher)[0] == {EOS}:
            break
        assert matcher.accept(token) is None
    else:
        pytest.fail("there is no limit")
    assert "too many states" in str(matcher.accept(EOS)) and "too many states" in str(matcher.accept(a))
    again = compiled(grammars, regex="(a|b)*a(a|b){20}c")
    assert a in allowed(grammars, again)[0] and again.accept(a) is None, "the next output is not lost with this one"


def test_a_grammar_whose_every_step_takes_much_memory_is_an_error(grammars: TokenGrammars) -> None:
    """Each token would leave half a megabyte behind."""
    matcher = compiled(grammars, regex="|".join(f"(a{{{n}}})*" for n in range(50, 2050)))
    a = grammars.tokenizer.encode("a")[0]
    assert matcher.accept(a) is None
    filled(grammars, [(matcher, ())])
    assert "too many expressions" in str(matcher.accept(a))


def test_a_long_text_that_must_follow_costs_no_time_per_step(grammars: TokenGrammars) -> None:
    """llguidance would tokenize all of it for every mask: 5 s here."""
    matcher = compiled(grammars, regex="a{100000}")
    a, start = grammars.tokenizer.encode("a")[0], time.thread_time()
    for _ in range(50):
        filled(grammars, [(matcher, ())])
        assert matcher.accept(a) is None
    assert time.thread_time() - start < 1


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> list[StructuredOutputsParams]:
    """What has been compiled so far."""
    noted: list[StructuredOutputsParams] = []
    really = TokenGrammars._compile

    def spy(self: TokenGrammars, params: StructuredOutputsParams) -> Any:
        noted.append(params)
        return really(self, params)

    monkeypatch.setattr(TokenGrammars, "_compile", spy)
    return noted


def test_the_same_grammar_is_compiled_once(
    tokenizer: Tokenizer, compiling: list[StructuredOutputsParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = TokenGrammars(tokenizer, SIZE, {EOS}, num_threads=1)
    monkeypatch.setattr(module, "MAX_COMPILED", 3)
    for word in ("u", "v", "u", "w", "x", "u", "v"):
        compiled(grammars, regex=f"{word}+")
    assert [params.regex for params in compiling] == ["u+", "v+", "w+", "x+", "v+"], (
        "the one not asked for longest goes"
    )
    assert len(grammars._compiled) == 3


def test_a_grammar_that_is_asked_for_again_gets_several_roots(tokenizer: Tokenizer) -> None:
    """The copies of one root wait for each other. Whatever root they have, each gets its own mask, in its own place."""
    grammars = TokenGrammars(tokenizer, SIZE, {EOS}, num_threads=2)
    matchers = [compiled(grammars, regex="(ab|cd)+") for _ in range(9)]
    assert len({id(matcher.roots) for matcher in matchers}) == 1 and len(matchers[0].roots) == 8
    copies = [matchers[0].copy() for _ in range(16)]  # as of a request with n = 16
    assert sorted(copy.number for copy in copies) == sorted([*range(8)] * 2)
    a, c = (tokenizer.encode(letter)[0] for letter in "ac")
    for i, matcher in enumerate(matchers):
        assert i % 3 == 0 or matcher.accept([a, c][i % 2]) is None
    matchers += [matchers[1].copy(), matchers[2].copy()]
    words = filled(grammars, [(matcher, ()) for matcher in matchers])
    size = len(words) // len(matchers)
    alone = [filled(grammars, [(matcher, ())]) for matcher in matchers]
    assert [words[i * size : (i + 1) * size] for i in range(len(matchers))] == alone
    assert len(set(alone)) == 3 and alone[9] == alone[1] and alone[10] == alone[2]


def test_grammars_that_are_all_in_use_share_the_roots(
    tokenizer: Tokenizer, compiling: list[StructuredOutputsParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever was first gives some away, and sooner or later nothing is compiled. What nobody asks for makes room."""
    monkeypatch.setattr(module, "MAX_COMPILED", 8)
    monkeypatch.setattr(module, "OUT_OF_USE", 20)
    grammars = TokenGrammars(tokenizer, SIZE, {EOS}, num_threads=2)  # up to 8 roots of a grammar
    for _ in range(10):
        found = compiled(grammars, regex="u+")
    assert len(found.roots) == 8 == len(compiling)
    for letter in "vwuw":
        compiled(grammars, regex=letter + "+")
    assert [*map(len, grammars._compiled.values())] == [1, 5, 2], "u gives as it has most, and not v, the oldest"
    draw = random.Random(0)
    for n in range(90):
        compiled(grammars, regex=draw.choice("uvw") + "+")
        if n == 60:
            assert len(compiling) < 16 and sorted(map(len, grammars._compiled.values())) == [2, 3, 3]
            del compiling[:]
    assert not compiling
    for _ in range(30):
        found = compiled(grammars, regex="x+")
    assert len(found.roots) == 8 == len(compiling)


def test_many_threads_compile_at_once(tokenizer: Tokenizer) -> None:
    """The same ones and different ones, from the first call on."""
    fresh = TokenGrammars(tokenizer, SIZE, {EOS})

    def ask(i: int) -> set[int]:
        matcher = compiled(fresh, regex=f"{'abcd'[i % 4]}+")
        return allowed(fresh, matcher)[0]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(64)))
    assert all(found[i] == found[i % 4] and tokenizer.encode("abcd"[i % 4])[0] in found[i] for i in range(64))
    assert len({frozenset(ids) for ids in found}) == 4


@pytest.fixture(params=["threads", "one thread"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "cpu_count", lambda: 4 if request.param == "threads" else None)
    yield


def test_any_number_of_threads_fills(threads: None, tokenizer: Tokenizer) -> None:
    fresh = TokenGrammars(tokenizer, SIZE, {EOS})
    matchers = [compiled(fresh, regex=f"{letter}b*") for letter in "abcdefgh"]
    words = filled(fresh, [(matcher, ()) for matcher in matchers])
    assert words == b"".join(filled(fresh, [(matcher, ())]) for matcher in matchers)
