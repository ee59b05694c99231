"""Twenty chats with SmolLM2: ids, texts and stops of `LLM.chat`, `AsyncLLM` and HTTP are those of HF's `generate`."""

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import RequestOutput
from nanovllm.text.token_texts import TokenTexts
from nanovllm.text.tokenizer import Tokenizer
from tests import hf_answers
from tests.hf_answers import Answer, Chat
from tests.server.harness import Served, read, server

DOT, COLON = 30, 42  # tokens of SmolLM2
SIZES: dict[str, Any] = {"max_model_len": 256, "num_kv_blocks": 400, "kvcache_block_size": 16, "max_num_seqs": 40}

CHATS = [
    # Until the model ends its answer, which it does at once, at the last token that it may use, or not at all.
    Chat(("What is 2 + 2?", "Plus 3?")),
    Chat(("What is the capital of Norway?", "And of Sweden?", "Which of the two is larger?")),
    Chat(("Say hello.", "Say it in French.", "Now in Spanish.")),
    Chat(("Translate 'good morning' into German.", "And 'good night'?"), max_tokens=24),
    Chat(("Repeat after me: 🦊🪁 kite", "Again, please.")),
    Chat(("What does the word 'naïve' mean?",)),
    Chat(("Tell me a joke.", "你好"), system="You are a fox who speaks of nothing but kites."),
    Chat(("Write a haiku about the sea.",), system="Answer briefly.", parts=True),
    Chat(("Thank you!", "Goodbye!"), parts=True),
    Chat(("Is water wet? Answer yes or no.", "Why?"), max_tokens=1),
    Chat(("Who wrote Hamlet?", "When did he live?"), max_tokens=7),
    # Until a stop string: within a token, across tokens, across parts of characters, of several, one never met.
    Chat(("Why is the sky blue?", "And at sunset?"), stop=("intricate dance", "nobody says this")),
    Chat(("Write a Python function that adds two numbers.", "And one that multiplies them."), stop=("num2)",)),
    Chat(("Repeat after me: 🦊🪁 kite", "Again, please."), stop=("🪁",)),
    Chat(("Give me a JSON object with a name and an age.", "Add a city."), max_tokens=24, stop=("}\n`",)),
    Chat(("How many legs does a spider have?", "And an ant?"), stop=("spiders",)),
    # Until a special token by its text, or past it.
    Chat(("What is the capital of Norway?", "And of Sweden?"), stop=("<|im_end|>",), ignore_eos=True),
    Chat(("What is 2 + 2?", "Plus 3?"), ignore_eos=True),
    # Until a token.
    Chat(("Name three colours.", "Name one more."), stop_token_ids=(COLON,)),
    Chat(("What is H2O?", "And CO2?"), stop_token_ids=(COLON, DOT), stop=("ecosystem",)),
]
Ask = Callable[[list[tuple[Chat, list[dict[str, Any]]]]], list[Answer]]


@pytest.fixture(scope="module")
def expected(smollm2: Path) -> list[list[Answer]]:
    return hf_answers.hf_answers(smollm2, CHATS)


@pytest.fixture(scope="module")
def served(smollm2: Path) -> Iterator[Served]:
    with server(smollm2, **SIZES) as served:
        yield served


def options(chat: Chat) -> dict[str, Any]:
    names = "max_tokens", "stop", "stop_token_ids", "ignore_eos"
    return {"temperature": 0.0, **{name: getattr(chat, name) for name in names}}


def compare(ask: Ask, expected: list[list[Answer]]) -> None:
    """All chats at once, turn by turn, each with the answers that it has got so far."""
    found: list[list[Answer]] = [[] for _ in CHATS]
    for turn in range(max(len(chat.users) for chat in CHATS)):
        going = [i for i, chat in enumerate(CHATS) if turn < len(chat.users)]
        answers = ask([(CHATS[i], CHATS[i].messages([answer.text for answer in found[i]])) for i in going])
        for i, answer in zip(going, answers, strict=True):
            assert answer == expected[i][turn], f"turn {turn} of {CHATS[i]}"
            found[i].append(answer)


def as_answer(output: RequestOutput) -> Answer:
    [choice] = output.outputs
    assert choice.finish_reason is not None
    return Answer(output.prompt_token_ids, choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason)


@pytest.mark.slow
def test_the_chats_end_in_every_way(expected: list[list[Answer]], smollm2: Path) -> None:
    """Or the comparisons below prove less than they seem to."""
    answers = [answer for answers in expected for answer in answers]
    reasons = {answer.stop_reason for answer in answers}
    assert {"intricate dance", "num2)", "🪁", "}\n`", "<|im_end|>", COLON, DOT} <= reasons
    assert len(CHATS) == 20 and sum(len(chat.users) > 1 for chat in CHATS) > 15
    assert any(len(answer.ids) == 24 and answer.finish_reason == "stop" for answer in answers)
    assert sum(answer.finish_reason == "length" for answer in answers) > 8
    by_eos = [a for a in answers if a.finish_reason == "stop" and a.stop_reason is None]
    assert len(by_eos) > 8 and all(answer.ids[-1] in (0, 2) for answer in by_eos)
    tokenizer = Tokenizer(smollm2)
    assert any(2 in answer.ids[:-1] for answer in answers), "nobody went on past EOS"
    assert any("\ufffd" in tokenizer.decode([token]) for answer in answers for token in answer.ids)


@pytest.mark.slow
def test_offline(expected: list[list[Answer]], smollm2: Path) -> None:
    with LLM(smollm2, **SIZES) as llm:

        def ask(turns: list[tuple[Chat, list[dict[str, Any]]]]) -> list[Answer]:
            params = [SamplingParams(**options(chat)) for chat, _ in turns]
            return list(map(as_answer, llm.chat([messages for _, messages in turns], params, use_tqdm=False)))

        compare(ask, expected)


@pytest.mark.slow
def test_in_tasks(expected: list[list[Answer]], served: Served) -> None:
    tokenizer = served.llm.llm.tokenizer
    assert tokenizer is not None

    async def one(chat: Chat, messages: list[dict[str, Any]]) -> Answer:
        stream = served.llm.generate(tokenizer.encode_chat(messages), SamplingParams(**options(chat)))
        prompt_ids = tokenizer.encode_chat(messages)
        [choice] = await read(stream)
        assert choice.finish_reason is not None
        return Answer(prompt_ids, choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason)

    async def all_of(turns: list[tuple[Chat, list[dict[str, Any]]]]) -> list[Answer]:
        return await asyncio.gather(*(one(*turn) for turn in turns))

    compare(lambda turns: asyncio.run(all_of(turns)), expected)


@pytest.mark.slow
def test_over_http(expected: list[list[Answer]], served: Served) -> None:
    """Whole and streamed at once. The ids are told by their bytes, which are different for every token of SmolLM2."""
    tokenizer = served.llm.llm.tokenizer
    assert tokenizer is not None
    texts, size = TokenTexts(tokenizer), tokenizer.fast.get_vocab_size()
    id_of = {texts.tokens[i].raw: i for i in range(size)}
    assert len(id_of) == size

    def one(chat: Chat, messages: list[dict[str, Any]], stream: bool) -> Answer:
        values: dict[str, Any] = {"model": "story", "messages": messages, "logprobs": True, **options(chat)}
        body = {"stop_token_ids": values.pop("stop_token_ids"), "ignore_eos": values.pop("ignore_eos")}
        if stream:
            values |= {"stream": True, "stream_options": {"include_usage": True}}
        with served.client() as client:
            said = client.chat.completions.create(**values, extra_body=body)
            chunks: list[Any] = list(said) if stream else [said]
        choices = [choice for chunk in chunks for choice in chunk.choices]
        usage = chunks[-1].usage
        text = "".join((choice.delta if stream else choice.message).content or "" for choice in choices)
        entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
        ids = [id_of[bytes(entry.bytes)] for entry in entries]
        prompt_ids = tokenizer.encode_chat(messages)
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt_ids), len(ids))
        assert all(choice.finish_reason is None for choice in choices[:-1])
        return Answer(prompt_ids, ids, text, choices[-1].finish_reason, choices[-1].stop_reason)

    with ThreadPoolExecutor(2 * len(CHATS)) as pool:

        def ask(turns: list[tuple[Chat, list[dict[str, Any]]]]) -> list[Answer]:
            both = [[pool.submit(one, *turn, stream) for turn in turns] for stream in (False, True)]
            whole, streamed = ([answer.result() for answer in answers] for answers in both)
            assert whole == streamed
            return whole

        compare(ask, expected)


def test_answers_are_made_again_when_anything_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of Hugging Face's answers: whatever they depend on changes, one after the other."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    asked: list[Chat] = []

    def ask(path: Path, chat: Chat) -> list[dict[str, Any]]:
        asked.append(chat)
        return [{"prompt_ids": [1], "ids": [len(asked)], "text": chat.users[0]}]

    monkeypatch.setattr(hf_answers, "ask", ask)

    def is_made(chats: list[Chat] = CHATS) -> bool:
        """Whether the answers are made now; then they are kept, too."""
        asked.clear()
        answers = [hf_answers.hf_answers(model, chats) for _ in range(2)]
        assert answers[0] == answers[1] and [[a.text for a in one] for one in answers[0]] == [
            [c.users[0]] for c in chats
        ]
        assert asked in ([], chats)
        return bool(asked)

    assert is_made() and not is_made()
    for library in (transformers, torch, tokenizers):
        monkeypatch.setattr(library, "__version__", "0.0")
        assert is_made() and not is_made()
    (model / "tokenizer.json").write_text("{ }")
    assert is_made()
    (model / "generation_config.json").write_text("{}")
    assert is_made()
    assert is_made([*CHATS[:-1], replace(CHATS[-1], max_tokens=2)])
    file = tmp_path / hf_answers.FILE
    for damaged in file.read_text()[:-5], "[]", '{"key": 1}':
        file.write_text(damaged)
        assert is_made() and not is_made()
    assert json.loads(file.read_text())["key"]["torch"] == "0.0"
