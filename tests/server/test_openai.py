"""The server as the `openai` client sees it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import RequestOutput
from nanovllm.server.openai.generation import encoded
from tests.server.harness import SMALL, STORY, Served, chat_model, server

MESSAGES: Any = [{"role": "user", "content": STORY}]


def complete(client: openai.OpenAI, prompt: Any = STORY, **more: Any) -> Any:
    values = {"model": "story", "max_tokens": 12, "seed": 3, "temperature": 0.9} | more
    return client.completions.create(prompt=prompt, **values)


def chat(client: openai.OpenAI, messages: Any = MESSAGES, **more: Any) -> Any:
    values = {"model": "story", "max_tokens": 12, "seed": 3, "temperature": 0.9} | more
    return client.chat.completions.create(messages=messages, **values)


@pytest.fixture(scope="module")
def engine() -> Any:
    with LLM(**SMALL) as llm:
        yield llm


def offline(engine: LLM, prompt: Any = STORY, **params: Any) -> RequestOutput:
    values = {"max_tokens": 12, "seed": 3, "temperature": 0.9} | params
    return engine.generate(prompt, SamplingParams(**values), use_tqdm=False)[0]


# --- completions -----------------------------------------------------------------------------------------------------


def test_a_completion_is_what_llm_generates(client: openai.OpenAI, engine: LLM) -> None:
    answer, expected = complete(client), offline(engine)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (expected.outputs[0].text, "length")
    assert answer.object == "text_completion" and answer.model == "story" and answer.id.startswith("cmpl-")
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (12, 12 + answer.usage.prompt_tokens)


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0},
        {"top_p": 0.5, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"extra_body": {"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.2, "ignore_eos": True, "priority": -3}},
        {"stop": [" the", "zzz"]},
        {"logit_bias": {"17": 100, 259: -200}, "extra_body": {"bad_words": ["the", "in a"], "min_tokens": 4}},
        {"extra_body": {"allowed_token_ids": [259, 262, 300, 301]}},
        {"stop": ".", "extra_body": {"include_stop_str_in_output": True, "min_tokens": 5}},
    ],
)
def test_parameters_mean_what_they_mean_to_llm(client: openai.OpenAI, engine: LLM, more: dict[str, Any]) -> None:
    sent = {"max_tokens": 24} | more
    params = {"max_tokens": 24} | {k: v for k, v in more.items() if k != "extra_body"} | more.get("extra_body", {})
    params.pop("priority", None)
    if "logit_bias" in params:
        params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"].items()}
    (ours,), theirs = complete(client, **sent).choices, offline(engine, **params).outputs[0]
    assert (ours.text, ours.finish_reason, ours.stop_reason) == (theirs.text, theirs.finish_reason, theirs.stop_reason)


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
def test_a_proxy_is_asked_to_hand_on_a_stream_piece_by_piece(served: Served, path: str) -> None:
    body = {"prompt": STORY} if path == "completions" else {"input" if path == "responses" else "messages": MESSAGES}
    with httpx.stream("POST", f"{served.url}/v1/{path}", json={**body, "stream": True}, timeout=30) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")


def test_prompts_in_every_form(client: openai.OpenAI, engine: LLM) -> None:
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode(STORY)
    text = complete(client).choices[0].text
    assert complete(client, ids).choices[0].text == text
    several = complete(client, ["Otto", STORY])
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.choices[1].text == text
    assert complete(client, [ids, ids[:3]]).choices[0].text == text
    assert several.usage.completion_tokens == 24


def test_choices_of_several_prompts_are_numbered_through(client: openai.OpenAI, engine: LLM) -> None:
    expected = [choice.text for prompt in ("Otto", STORY) for choice in offline(engine, prompt, n=2).outputs]
    answer = complete(client, ["Otto", STORY], n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(expected))
    texts = dict.fromkeys(range(4), "")
    for chunk in complete(client, ["Otto", STORY], n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == expected


def test_logprobs_of_a_completion(client: openai.OpenAI, engine: LLM) -> None:
    expected = offline(engine, logprobs=2).outputs[0]
    whole = complete(client, logprobs=2).choices[0].logprobs
    assert "".join(whole.tokens) == expected.text and whole.text_offset[0] == 0
    assert expected.logprobs is not None
    chosen = [entry[token].logprob for entry, token in zip(expected.logprobs, expected.token_ids, strict=True)]
    assert whole.token_logprobs == pytest.approx(chosen, abs=1e-4)
    assert all(len(top) == 2 and list(top.values()) == sorted(top.values())[::-1] for top in whole.top_logprobs)
    streamed = [chunk.choices[0].logprobs for chunk in complete(client, logprobs=2, stream=True)]
    assert [token for part in streamed for token in part.tokens] == whole.tokens
    assert [offset for part in streamed for offset in part.text_offset] == whole.text_offset
    assert complete(client, logprobs=0).choices[0].logprobs.top_logprobs == [{}] * 12


def test_usage_of_a_stream(client: openai.OpenAI) -> None:
    usage = complete(client).usage
    *chunks, last = complete(client, stream=True, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == [] and last.usage.total_tokens == usage.total_tokens
    assert chunks[-1].choices[0].finish_reason == "length"
    assert "usage" not in next(iter(complete(client, stream=True))).model_fields_set


def test_cached_tokens_are_told_and_a_salt_keeps_them_apart(client: openai.OpenAI) -> None:
    prompt = "A kind fox called Ned lived there in a den lined with dry leaves. " * 4

    def cached(salt: str) -> int:
        usage = complete(client, prompt, extra_body={"cache_salt": salt}).usage
        return int(usage.prompt_tokens_details.cached_tokens)

    assert cached("a") == 0 and cached("b") == 0
    assert cached("a") > 0


# --- chat ------------------------------------------------------------------------------------------------------------


def test_a_chat_is_the_completion_of_its_template(client: openai.OpenAI, engine: LLM) -> None:
    expected = offline(engine, STORY + "\n").outputs[0]
    answer = chat(client)
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", expected.text)
    assert answer.object == "chat.completion" and answer.usage.completion_tokens == 12
    parts = [{"role": "user", "content": [{"type": "text", "text": text} for text in ("Nell.", STORY)]}]
    joined = offline(engine, f"Nell.\n{STORY}\n").outputs[0]
    assert chat(client, parts).choices[0].message.content == joined.text
    assert chat(client, [*MESSAGES, message.model_dump(), *MESSAGES]).choices[0].message.content


def test_a_template_that_walks_over_parts_gets_parts_offline_and_here(tmp_path: Path) -> None:
    """CASES D7: whatever the caller writes, the words are in the prompt, and it is the same prompt in both."""
    model = chat_model(tmp_path)
    path = model / "tokenizer_config.json"
    template = "{% for m in messages %}{% for part in m.content %}{{ part.text }}|{% endfor %}{% endfor %}"
    template += "{% if add_generation_prompt %}>{% endif %}"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    parts = [{"type": "text", "text": text} for text in ("Nell the fox", STORY)]
    with server(model) as served, served.client() as client:
        tokenizer, encode = served.llm.llm.tokenizer, served.llm.llm.tokenizer.encode_chat
        for content, prompt, ask in (
            (STORY, f"{STORY}|>", True),
            (parts, f"Nell the fox|{STORY}|>", True),
            (parts, f"Nell the fox|{STORY}|", False),
        ):
            messages: Any = [{"role": "user", "content": content}]
            assert encode(messages, ask) == tokenizer.encode(prompt)
            answer = chat(client, messages, extra_body={"add_generation_prompt": ask})
            assert answer.choices[0].message.content == complete(client, prompt).choices[0].text
            assert answer.usage.prompt_tokens == len(tokenizer.encode(prompt))


def test_a_chat_streams(client: openai.OpenAI) -> None:
    whole = [choice.message.content for choice in chat(client, n=2).choices]
    opening, *chunks = chat(client, n=2, stream=True)
    assert [choice.delta.role for choice in opening.choices] == ["assistant"] * 2
    texts, reasons = ["", ""], []
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content
        reasons += [choice.finish_reason] if choice.finish_reason else []
    assert texts == whole and reasons == ["length"] * 2
    assert chunks[0].object == "chat.completion.chunk"


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    choice = chat(client, logprobs=True, top_logprobs=3).choices[0]
    content = choice.logprobs.content
    assert "".join(entry.token for entry in content) == choice.message.content
    for entry in content:
        assert entry.bytes == list(entry.token.encode())
        assert len(entry.top_logprobs) == 3 and entry.logprob <= entry.top_logprobs[0].logprob <= 0
    streamed = chat(client, logprobs=True, stream=True)
    tokens = [e.token for chunk in streamed for c in chunk.choices if c.logprobs for e in c.logprobs.content]
    assert tokens == [entry.token for entry in content]


def test_without_max_tokens_a_chat_may_use_the_whole_context(client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": STORY * 25}]
    answer = chat(client, long, max_tokens=None, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == 256 and answer.choices[0].finish_reason == "length"
    assert chat(client, max_tokens=None, max_completion_tokens=3).usage.completion_tokens == 3


# --- models ----------------------------------------------------------------------------------------------------------


def test_models(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert (card.id, card.object, card.owned_by) == ("story", "model", "nanovllm")
    assert client.models.retrieve("story").id == "story"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


@pytest.mark.slow
def test_hundreds_of_clients_at_once(served: Served) -> None:
    """Each gets its own answer, whole or streamed."""

    async def main() -> None:
        url = f"{served.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=60) as client:

            async def one(i: int) -> str:
                params: Any = {"model": "story", "max_tokens": 1 + i % 5, "temperature": 0}
                if i < 100:
                    return (await client.completions.create(prompt=[i % 50 + 1, 9], **params)).choices[0].text
                stream = await client.completions.create(prompt=[i % 50 + 1, 9], stream=True, **params)
                return "".join([chunk.choices[0].text async for chunk in stream])

            answers = await asyncio.gather(*(one(i) for i in range(200)))
            for i in range(50):  # those 50 apart ask for the same
                assert len({answers[j] for j in range(i, 200, 50)}) == 1

    asyncio.run(main())


def test_others_have_their_turns_while_a_large_answer_is_encoded() -> None:
    choices = [{"index": i, "text": '"choices":[]'} for i in range(5)]
    body = {"id": "x", "choices": choices, "usage": {"total_tokens": 1}}
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main() -> bytes:
        task = asyncio.create_task(other())
        try:
            return await encoded(body)
        finally:
            task.cancel()

    assert json.loads(asyncio.run(main())) == body and turns >= len(choices)
    assert json.loads(asyncio.run(encoded({"output": []}))) == {"output": []}
