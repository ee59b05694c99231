"""What a client is told of its own prompt: `echo`, `max_tokens: 0` and `prompt_logprobs`, against Hugging Face."""

import asyncio
import json
import sys
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from nanovllm import SamplingParams
from nanovllm.llm import EMBEDDED_MODEL
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import RequestOutputKind
from nanovllm.server.openai import scoring
from nanovllm.server.openai.scoring import Echo
from nanovllm.text.token_texts import TokenTexts
from nanovllm.text.tokenizer import Tokenizer
from tests.server.harness import STORY, Served
from tests.server.pair import figures, one, pair, slow
from tests.server.pure import PureLLM
from tests.server.test_errors import CHAT, COMPLETIONS, ask, error_of
from tests.server.test_openai import MESSAGES, complete
from tests.server.test_process import started

PROMPTS = [STORY, "Otto ate a crème brûlée 🦊 and slept."]


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)


def truth(model: Any, token_ids: list[int]) -> torch.Tensor:
    """The log-probabilities of what follows each token, [T, V]."""
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    return found


def own(model: Any, token_ids: list[int]) -> list[float]:
    """The log-probability of each token but the first."""
    return truth(model, token_ids)[:-1].gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()


def ids_of(served: Served, text: str) -> list[int]:
    assert served.llm.llm.tokenizer is not None
    return served.llm.llm.tokenizer.encode(text)


def check_columns(text: str, logprobs: Any) -> None:
    """Every token stands in the text where its offset says, and the tokens joined are the text."""
    assert "".join(logprobs.tokens) == text
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert text[offset : offset + len(token)] == token


# --- echo ------------------------------------------------------------------------------------------------------------


def test_prompts_are_scored_and_nothing_is_generated(served: Served, client: openai.OpenAI, model: Any) -> None:
    """Texts and token ids give the same, one by one and in a batch."""
    ids = [ids_of(served, prompt) for prompt in PROMPTS]
    for given in PROMPTS, ids:
        answer = complete(client, given, max_tokens=0, echo=True, logprobs=2)
        assert answer.usage.completion_tokens == 0 and answer.usage.prompt_tokens == sum(map(len, ids))
        for choice, text, token_ids in zip(answer.choices, PROMPTS, ids, strict=True):
            assert (choice.text, choice.finish_reason, choice.stop_reason) == (text, "length", None)
            found = choice.logprobs
            check_columns(text, found)
            assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
            assert found.token_logprobs[1:] == pytest.approx(own(model, token_ids), abs=1e-3)
            likeliest = truth(model, token_ids)[:-1].topk(2).values.tolist()
            for top, expected in zip(found.top_logprobs[1:], likeliest, strict=True):
                assert list(top.values()) == pytest.approx(expected, abs=1e-3)


def test_a_prompt_stands_before_its_outputs(served: Served, client: openai.OpenAI) -> None:
    """Each choice of each prompt: the same text, tokens and log-probabilities as without `echo`."""
    more: dict[str, Any] = {"n": 2, "logprobs": 1, "max_tokens": 5, "temperature": 1}
    plain, echoed = (complete(client, PROMPTS, echo=echo, **more) for echo in (False, True))
    prompts = complete(client, PROMPTS, echo=True, logprobs=1, max_tokens=0).choices
    assert echoed.usage.completion_tokens == plain.usage.completion_tokens == 20
    for i, (without, choice) in enumerate(zip(plain.choices, echoed.choices, strict=True)):
        prompt = prompts[i // 2]
        assert choice.text == prompt.text + without.text and choice.finish_reason == without.finish_reason
        check_columns(choice.text, choice.logprobs)
        assert choice.logprobs.tokens == prompt.logprobs.tokens + without.logprobs.tokens
        values = prompt.logprobs.token_logprobs[1:] + without.logprobs.token_logprobs
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(values, abs=1e-4)
        assert len(choice.logprobs.top_logprobs) == len(choice.logprobs.tokens)
    assert complete(client, echo=True, **more | {"logprobs": None}).choices[0].logprobs is None


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_a_stream_begins_with_the_prompt(client: openai.OpenAI, max_tokens: int) -> None:
    more: dict[str, Any] = {"n": 2, "logprobs": 1, "max_tokens": max_tokens, "echo": True, "temperature": 1}
    whole = complete(client, PROMPTS, **more).choices
    for extra in {}, {"logprobs": None}:
        texts, tokens, offsets = [""] * 4, [list[str]() for _ in range(4)], [list[int]() for _ in range(4)]
        options = {"include_usage": True}
        *chunks, last = complete(client, PROMPTS, stream=True, stream_options=options, **more | extra)
        for chunk in chunks:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                if choice.logprobs is not None:
                    tokens[choice.index] += choice.logprobs.tokens
                    offsets[choice.index] += choice.logprobs.text_offset
        assert texts == [choice.text for choice in whole] and last.usage.completion_tokens == 4 * max_tokens
        if not extra:
            assert tokens == [choice.logprobs.tokens for choice in whole]
            assert offsets == [choice.logprobs.text_offset for choice in whole]


def test_an_echo_is_what_counts_of_a_cut_prompt(served: Served, client: openai.OpenAI, model: Any) -> None:
    ids = ids_of(served, STORY)[-3:]
    body = {"truncate_prompt_tokens": 3, "return_token_ids": True}
    (choice,) = complete(client, max_tokens=0, echo=True, logprobs=0, extra_body=body).choices
    assert STORY.endswith(choice.text) and choice.prompt_token_ids == ids and choice.token_ids == []
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(own(model, ids), abs=1e-3)
    assert choice.logprobs.top_logprobs == [None, {}, {}]


def test_a_token_before_the_text_is_no_part_of_the_text() -> None:
    """A BOS that the tokenizer puts there, a client's own special tokens, and a character of several tokens."""
    tokenizer = Tokenizer(EMBEDDED_MODEL)
    texts, end = TokenTexts(tokenizer), tokenizer.decode([0], skip_special_tokens=False)
    text = f"a{end}🦊b"
    ids = tokenizer.encode(text)
    assert 0 in ids and len(ids) > 5
    for before in [], [0]:
        echo = Echo(texts, text, before + ids, None)
        assert echo.text == text and echo.tokens[len(before) :] == Echo(texts, None, ids, None).tokens
        assert "".join(echo.tokens[len(before) :]) == text and echo.offsets[: len(before) + 1] == [0] * (
            len(before) + 1
        )
        assert echo.offsets[-1] == len(text) - 1
    assert Echo(texts, None, [0, *ids], None).text == end + text
    assert Echo(texts, "other", ids, None).offsets[-1] == 5  # a tokenizer that changes texts: never past the end


# --- prompt_logprobs -------------------------------------------------------------------------------------------------


def test_prompt_logprobs_have_the_form_of_vllm(served: Served, model: Any) -> None:
    body: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "prompt_logprobs": 2, "return_token_ids": True}
    answer = ask(served, COMPLETIONS, body | {"prompt": PROMPTS, "n": 2, "temperature": 1}).json()
    for i, choice in enumerate(answer["choices"][1:3]):
        check_listed(model, ids_of(served, PROMPTS[i]), choice["prompt_logprobs"])
    chat = ask(served, CHAT, body | {"messages": MESSAGES}).json()
    check_listed(model, chat["prompt_token_ids"], chat["prompt_logprobs"])
    assert chat["usage"]["completion_tokens"] == 2
    nothing = ask(served, CHAT, body | {"messages": MESSAGES, "max_tokens": 0}).json()
    assert nothing["prompt_logprobs"] == chat["prompt_logprobs"] and nothing["choices"][0]["message"]["content"] == ""
    assert nothing["choices"][0]["finish_reason"] == "length" and nothing["usage"]["completion_tokens"] == 0
    assert "prompt_logprobs" not in ask(served, CHAT, {"messages": MESSAGES, "max_tokens": 1}).json()
    assert ask(served, COMPLETIONS, body | {"prompt": [7]}).json()["choices"][0]["prompt_logprobs"] == [None]


def check_listed(model: Any, ids: list[int], listed: list[Any], n: int = 2) -> None:
    assert listed[0] is None and len(listed) == len(ids)
    for token, entry, expected in zip(ids[1:], listed[1:], truth(model, ids), strict=False):
        assert set(entry) == {str(token), *map(str, expected.topk(n).indices.tolist())}
        for id, item in entry.items():
            assert item["logprob"] == pytest.approx(float(expected[int(id)]), abs=1e-3)
            assert item["rank"] == 1 + int((expected > expected[int(id)]).sum()) and item["decoded_token"] is not None


def test_beside_an_echo_each_has_as_many_as_it_asks_for(served: Served) -> None:
    body = {"prompt": STORY, "max_tokens": 0, "echo": True}
    for echoed, listed in (0, 3), (3, 0):
        (choice,) = ask(served, COMPLETIONS, body | {"logprobs": echoed, "prompt_logprobs": listed}).json()["choices"]
        assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} == {echoed}
        assert {len(entry) for entry in choice["prompt_logprobs"][1:]} <= {max(listed, 1), listed + 1}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "0"),
        ({"prompt_logprobs": True}, "prompt_logprobs", "integer"),
        ({"echo": 1}, "echo", "boolean"),
        ({"max_tokens": -1}, "max_tokens", "0"),
        ({"max_tokens": 0, "min_tokens": 2}, "min_tokens", "max_tokens"),
    ],
)
def test_what_makes_no_sense_is_refused(served: Served, body: dict[str, Any], param: str, message: str) -> None:
    error = error_of(ask(served, COMPLETIONS, {"prompt": STORY} | body), 400)
    assert error["param"] == param and message in error["message"]


def test_an_answer_too_large_for_the_memory_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "MOST_SCORES", 12)
    body = {"prompt": [[1, 2, 3], [1, 2, 3]], "max_tokens": 0}
    assert ask(served, COMPLETIONS, body | {"prompt_logprobs": 1}).status_code == 200
    for more in {"echo": True, "logprobs": 2}, {"echo": True, "logprobs": 1, "n": 2}, {"prompt_logprobs": 1, "n": 2}:
        error = error_of(ask(served, COMPLETIONS, body | more), 400)
        assert error["param"] == "prompt_logprobs" and "send fewer" in error["message"]


def test_an_echo_of_a_chat_is_refused(served: Served) -> None:
    assert error_of(ask(served, CHAT, {"messages": MESSAGES, "echo": True}), 400)["param"] == "echo"


# --- from the engine's process ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("delay", [0, 0.02])
def test_scores_cross_the_border_bit_by_bit(kind: RequestOutputKind, delay: float) -> None:
    """Whole in every delta, the first included; also if the reader is slow, and for a prompt that comes in chunks."""
    params = SamplingParams(n=3, seed=1, max_tokens=6, ignore_eos=True, prompt_logprobs=2, output_kind=kind)
    plain = params.changed(prompt_logprobs=None)
    long = {"prompt_token_ids": list(range(1, 60))}

    async def read(stream: Any) -> list[RequestOutput]:
        return [output async for output in stream]

    async def main() -> None:
        config: dict[str, Any] = {"max_num_batched_tokens": 16}
        async with pair(PureLLM(**config)) as (_server, [client]):
            slow(client, delay)
            streams = [
                await one(client, prompt, p)
                for prompt, p in ((long, params), ({"prompt_token_ids": [5]}, params), (long, plain))
            ]
            scored, single, unscored = await asyncio.gather(*map(read, streams))
            found = figures(await client.scrape())
            assert found["vllm:prompt_tokens_total"] == 2 * 59 + 1
            assert found["vllm:prefix_cache_queries_total"] == 59, "a prompt that is scored is not looked up"
        expected = PureLLM(text=True, **config)
        expected.engine.add_request("0", long["prompt_token_ids"], params)
        steps = []
        while expected.engine.has_unfinished():
            steps += expected.engine.step()
        last = steps[-1]
        assert last.prompt_logprobs is not None and len(last.prompt_logprobs) == 59
        assert all(output.prompt_logprobs == last.prompt_logprobs for output in scored)
        assert all(output.prompt_logprobs == [None] for output in single)
        assert all(output.prompt_logprobs is None for output in unscored)

    asyncio.run(main())


@pytest.mark.slow
def test_a_server_of_several_processes_gives_the_same(model: Any) -> None:
    command = [sys.executable, "-m", "nanovllm.cli", "serve", "--port", "0", "--kv-cache-gib", "0.02"]
    command += ["--max-num-batched-tokens", "16", "--api-servers", "2"]
    body = {"prompt": PROMPTS, "max_tokens": 0, "echo": True, "logprobs": 1, "n": 2}
    tokenizer = Tokenizer(EMBEDDED_MODEL)
    with started(command) as process:
        answer = httpx.post(f"{process.url()}/v1/completions", json=body, timeout=60).json()
        lines = httpx.post(f"{process.url()}/v1/completions", json=body | {"stream": True}, timeout=60).text.split(
            "\n\n"
        )
    for i, choice in enumerate(answer["choices"]):
        expected = own(model, tokenizer.encode(PROMPTS[i // 2]))
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=1e-3)
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if "{" in line]
    assert sorted(chunks, key=lambda chunk: chunk["index"]) == answer["choices"]
