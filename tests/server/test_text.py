"""CASES D1 through the server: streamed text is the unstreamed text, in every script, wherever it ends."""

from pathlib import Path
from typing import Any

import openai
import pytest

from nanovllm.text.tokenizer import Tokenizer
from tests.server.harness import server

SCRIPTS = {
    "latin": "Nell the fox had a red kite.",
    "accents": "Où est l'élève naïf? Zażółć gęślą jaźń.",
    "cyrillic": "Жила-была лиса, и был у неё змей.",
    "greek": "Μια φορά κι έναν καιρό ήταν μια αλεπού.",
    "hebrew": "היה היה שועל אחד",
    "arabic": "كان يا ما كان ثعلب صغير",
    "devanagari": "एक बार की बात है, एक लोमड़ी थी।",
    "thai": "กาลครั้งหนึ่งมีสุนัขจิ้งจอก",
    "chinese": "从前有一只狐狸，它有一个红色的风筝。",
    "japanese": "むかしむかし、キツネが住んでいました。",
    "korean": "옛날 옛적에 여우가 살았습니다.",
    "emoji": "🦊🪁 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
    "beyond the basic plane": "𝄞 𝕬𝖑𝖌𝖊𝖇𝖗𝖆 𓂀",
}


def whole_and_streamed(client: openai.OpenAI, prompt: str, **params: Any) -> tuple[list[Any], list[Any]]:
    """(text, finish_reason, stop_reason) of each choice, asked for in one piece and as a stream."""
    values: dict[str, Any] = {"model": "story", "prompt": prompt, **params}
    whole = [(c.text, c.finish_reason, c.stop_reason) for c in client.completions.create(**values).choices]
    texts, ends = [""] * len(whole), [(None, None)] * len(whole)
    for chunk in client.completions.create(stream=True, **values):
        for choice in chunk.choices:
            assert ends[choice.index] == (None, None), "text after the end"
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason, choice.stop_reason
    return whole, [(text, *end) for text, end in zip(texts, ends, strict=True)]


ALWAYS = "accents", "arabic", "devanagari", "chinese", "emoji"  # the others in the slow tier


@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in SCRIPTS]
)
def test_streamed_is_unstreamed(client: openai.OpenAI, script: str) -> None:
    """At a temperature that makes the story model write bytes of all kinds, whole characters and pieces of them."""
    for max_tokens in 1, 12:
        whole, streamed = whole_and_streamed(
            client, SCRIPTS[script], n=2, seed=max_tokens, temperature=2, max_tokens=max_tokens
        )
        assert whole == streamed


def test_streamed_is_unstreamed_where_a_stop_string_is_held_back(client: openai.OpenAI) -> None:
    for stop in ([" the kite"], ["e", "zz"], ["\n"], ["nobody says this", "."]):
        whole, streamed = whole_and_streamed(
            client, SCRIPTS["latin"], n=2, seed=5, temperature=0.9, max_tokens=20, stop=stop
        )
        assert whole == streamed
        assert not any(s in text for text, *_ in whole for s in stop)


def test_streamed_is_unstreamed_where_a_stop_string_has_characters_of_several_tokens(client: openai.OpenAI) -> None:
    """It is cut out of what is generated without it, so that one choice meets it for sure."""
    params: dict[str, Any] = {"n": 8, "seed": 1, "temperature": 2, "max_tokens": 24}
    answer = client.completions.create(model="story", prompt=SCRIPTS["emoji"], logprobs=0, **params)
    for choice in answer.choices:
        pieces = zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)
        begun = [offset for token, offset in pieces if not token]  # where a character has more than one token
        wide = [i for i in begun if i < len(choice.text) and choice.text[i] != "\ufffd"]
        if wide:
            break
    middle = wide[0]
    stop = choice.text[max(middle - 1, 0) : middle + 2]
    whole, streamed = whole_and_streamed(client, SCRIPTS["emoji"], stop=stop, **params)
    assert whole == streamed
    assert whole[choice.index] == (choice.text[: choice.text.index(stop)], "stop", stop)


def test_what_is_sampled_here_would_trip_a_careless_detokenizer(client: openai.OpenAI) -> None:
    """Or the tests above prove nothing: there are characters of several bytes, and tokens that are parts of one."""
    answer = client.completions.create(
        model="story", prompt=SCRIPTS["emoji"], n=8, seed=1, temperature=2, max_tokens=24, logprobs=0
    )
    pieces = [token for choice in answer.choices for token in choice.logprobs.tokens]
    assert sum(not piece or "\ufffd" in piece for piece in pieces) > 5
    assert any(ord(letter) > 127 and letter != "\ufffd" for choice in answer.choices for letter in choice.text)


def test_logprobs_add_up_to_the_text_whatever_the_tokens(client: openai.OpenAI) -> None:
    """CASES D4: texts joined, offsets into the text, and as many of the likeliest as were asked for."""
    params: dict[str, Any] = {"n": 8, "seed": 1, "temperature": 2, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    for choice in client.completions.create(model="story", prompt=SCRIPTS["emoji"], logprobs=5, **params).choices:
        found = choice.logprobs
        shown = [token if token != "<|endoftext|>" else "" for token in found.tokens]
        assert "".join(shown) == choice.text
        assert found.text_offset == [len("".join(shown[:i])) for i in range(len(shown))]
        assert [len(top) for top in found.top_logprobs] == [5] * 24
    messages: Any = [{"role": "user", "content": SCRIPTS["emoji"]}]
    answer = client.chat.completions.create(model="story", messages=messages, logprobs=True, top_logprobs=5, **params)
    for choice in answer.choices:
        entries: list[Any] = choice.logprobs.content
        spoken = [entry for entry in entries if entry.token != "<|endoftext|>"]
        assert "".join(entry.token for entry in spoken) == choice.message.content
        raw = bytes(byte for entry in spoken for byte in entry.bytes)
        assert raw.decode(errors="replace") == choice.message.content
        assert {len(entry.top_logprobs) for entry in entries} == {5}
        assert all(top.bytes for entry in entries for top in entry.top_logprobs)


@pytest.mark.slow
def test_a_real_model_in_every_script(smollm2: Path) -> None:
    """SmolLM2 repeats what it is shown, in scripts of which most characters are several tokens."""
    tokenizer = Tokenizer(smollm2)
    split = 0
    with server(smollm2, num_kv_blocks=200, max_model_len=512) as served, served.client() as client:
        for text in SCRIPTS.values():
            prompt = f"{text}\n{text}\n{text[: len(text) // 2]}"
            whole, streamed = whole_and_streamed(client, prompt, max_tokens=12, temperature=0)
            assert whole == streamed
            split += sum("\ufffd" in tokenizer.decode([token]) for token in tokenizer.encode(whole[0][0]))
    assert split > 20
