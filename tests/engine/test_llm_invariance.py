"""With a real model: what a request gets does not depend on caching, chunks, company or preemption, nor do its
log-probabilities and its text (CASES P1, S2, C1, M3, D1)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, CompletionOutput, SamplingParams
from nanovllm.outputs import Logprob
from tests.engine.helpers import BOTH
from tests.weights import lively_qwen3

Entries = Sequence[dict[int, Logprob] | None]
STORY_MODEL = Path(__file__).parents[2] / "assets" / "story_model"
PROMPT = [(37 * i) % 500 for i in range(23)]
FIVE = [
    SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True, logprobs=4),
    SamplingParams(temperature=0.8, seed=6, max_tokens=5, ignore_eos=True, logprobs=0, top_p=0.9),
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.2, seed=7, max_tokens=7, ignore_eos=True, logprobs=1, top_k=3, repetition_penalty=1.3),
    SamplingParams(temperature=1.0, seed=8, max_tokens=6, logprobs=3, min_p=0.2, frequency_penalty=0.5, min_tokens=4),
]
FIVE_PROMPTS = [[*PROMPT[: 4 * i], i] for i in range(1, 6)]  # they share beginnings of different lengths


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively_qwen3(tmp_path_factory.getbasetemp() / "engine-checkpoints")


def make(path: Path, **config: Any) -> LLM:
    sizes = {"kvcache_block_size": 4, "num_kv_blocks": 60, "max_model_len": 200}
    return LLM(path, skip_tokenizer_init=True, **sizes | config)


def choice(llm: LLM, prompt: list[int], params: SamplingParams) -> CompletionOutput:
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]


def check_same(found: CompletionOutput, expected: CompletionOutput) -> None:
    """The same tokens, and for each position the same candidates in the same order with the same log-probabilities."""
    assert (found.token_ids, found.finish_reason) == (expected.token_ids, expected.finish_reason)
    assert found.logprobs is not None and expected.logprobs is not None
    assert found.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-3)
    check_close(found.logprobs, expected.logprobs)


def check_close(found: Entries, expected: Entries) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours is not None and theirs is not None
        assert {id: p.rank for id, p in ours.items()} == {id: p.rank for id, p in theirs.items()}
        assert [p.logprob for p in ours.values()] == pytest.approx([p.logprob for p in theirs.values()], abs=1e-4)


@BOTH
def test_p1_a_prompt_that_is_cached_whole_has_the_same_logprobs(tiny: Path, asynchronous: bool) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=3)
    with make(tiny, kvcache_block_size=2, async_scheduling=asynchronous) as llm:
        cold = llm.generate([PROMPT[:4]], params, use_tqdm=False)[0]
        warm = llm.generate([PROMPT[:4]] * 3, params, use_tqdm=False)
    assert [output.num_cached_tokens for output in (cold, *warm)] == [0, 2, 2, 2]
    for output in warm:
        check_same(output.outputs[0], cold.outputs[0])


@pytest.mark.parametrize("cached", [0, 1, 2])
def test_c1_chunks_and_cached_blocks_do_not_show_in_logprobs(tiny: Path, cached: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=5)
    with make(tiny) as llm:
        expected = choice(llm, PROMPT, params)
    for budget, asynchronous in (1, False), (2, False), (3, False), (5, False), (64, False), (3, True):
        with make(tiny, max_num_batched_tokens=budget, async_scheduling=asynchronous) as llm:
            if cached:
                choice(llm, [*PROMPT[: 4 * cached], 499], SamplingParams(max_tokens=1))
            output = llm.generate([PROMPT], params, use_tqdm=False)[0]
        assert output.num_cached_tokens == 4 * cached
        check_same(output.outputs[0], expected)


@BOTH
def test_m3_alone_and_in_a_batch_of_five(tiny: Path, asynchronous: bool) -> None:
    with make(tiny, async_scheduling=asynchronous) as llm:
        together = llm.generate(FIVE_PROMPTS, FIVE, use_tqdm=False)
        backwards = llm.generate(FIVE_PROMPTS[::-1], FIVE[::-1], use_tqdm=False)[::-1]
    with make(tiny, enable_prefix_caching=False) as llm:
        alone = [choice(llm, prompt, params) for prompt, params in zip(FIVE_PROMPTS, FIVE, strict=True)]
    assert len({tuple(output.token_ids) for output in alone}) == 5
    for found in (together, backwards):
        for output, expected in zip(found, alone, strict=True):
            check_same(output.outputs[0], expected)


@pytest.mark.parametrize(
    "config",
    [{"async_scheduling": False}, {"async_scheduling": True}, {"speculative": {"method": "ngram", "k": 2}}],
    ids=["sync", "async", "ngram"],
)
def test_m3_among_requests_that_ask_for_nothing_special(tiny: Path, config: dict[str, Any]) -> None:
    """Only some rows of a step then go through penalties, filters and log-probabilities."""
    plain = [SamplingParams(temperature=t, seed=3, max_tokens=12, ignore_eos=True) for t in (0.0, 1.0)]
    prompts = [prompt for p in FIVE_PROMPTS for prompt in (p, PROMPT)]
    params = [p for i, special in enumerate(FIVE) for p in (special, plain[i % 2])]
    with make(tiny, **config) as llm:
        found = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    with make(tiny, enable_prefix_caching=False) as llm:
        expected = [choice(llm, prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    for ours, theirs in zip(found[::2], expected[::2], strict=True):
        check_same(ours, theirs)
    assert [(o.token_ids, o.logprobs) for o in found[1::2]] == [(o.token_ids, None) for o in expected[1::2]]


@BOTH
def test_s2_preemption_shows_neither_in_tokens_nor_in_logprobs(tiny: Path, asynchronous: bool) -> None:
    prompts = [[i, 2, 3] for i in range(3)]
    params = [
        SamplingParams(temperature=t, seed=9, max_tokens=6, ignore_eos=True, logprobs=2, presence_penalty=0.5)
        for t in (0.0, 1.0, 1.0)
    ]
    with make(tiny, kvcache_block_size=2) as llm:
        expected = [choice(llm, prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    for caching in False, True:
        tight = {"kvcache_block_size": 2, "num_kv_blocks": 6, "enable_prefix_caching": caching}
        with make(tiny, **tight, async_scheduling=asynchronous) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
        for output, alone in zip(outputs, expected, strict=True):
            check_same(output.outputs[0], alone)


@BOTH
@pytest.mark.parametrize("more", [{}, {"min_p": 1e-9}], ids=["plain tail", "full tail"])
def test_every_token_is_drawn_anew(tiny: Path, more: dict[str, Any], asynchronous: bool) -> None:
    """So hot that the noise alone decides: with the same noise for each token of a request, all would be one token."""
    params = [SamplingParams(temperature=1e4, seed=seed, max_tokens=20, ignore_eos=True, **more) for seed in (1, 2)]
    with make(tiny, async_scheduling=asynchronous) as llm:
        outputs = llm.generate([PROMPT, PROMPT], params, use_tqdm=False)
    first, second = (output.outputs[0].token_ids for output in outputs)
    assert len(set(first)) > 15 and len(set(second)) > 15
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 3


@pytest.fixture(scope="module")
def story_llm() -> Iterator[LLM]:
    with LLM(STORY_MODEL, max_model_len=256, num_kv_blocks=40) as llm:
        yield llm


def follow(llm: LLM, requests: list[SamplingParams]) -> list[CompletionOutput]:
    """The outputs of one prompt under several parameters; on the way, text is only ever added."""
    texts = [""] * len(requests)
    found: dict[int, CompletionOutput] = {}
    for i, params in enumerate(requests):
        llm.engine.add_request(str(i), [46, 381], params)
    while llm.engine.has_unfinished():
        for output in llm.engine.step():
            i, found[i] = int(output.request_id), output.outputs[0]
            assert found[i].text.startswith(texts[i])
            texts[i] = found[i].text
    return [found[i] for i in range(len(requests))]


def test_d1_text_while_it_grows_is_the_text_of_its_tokens(story_llm: LLM) -> None:
    """So hot that any token may come: halves of words, special ones, bytes of characters that are never completed."""
    assert story_llm.tokenizer is not None
    decode = story_llm.tokenizer.decode
    hot = [SamplingParams(temperature=20.0, seed=seed, max_tokens=24, ignore_eos=True) for seed in range(4)]
    whole = follow(story_llm, hot)
    assert [output.text for output in whole] == [decode(output.token_ids) for output in whole]
    ends = []  # of each its ids, its text, and where to cut it off: in the middle of a character, if there is one
    for output in whole:
        ids = output.token_ids
        broken = [n for n in range(4, len(ids)) if decode(ids[:n]).endswith("\ufffd")]
        ends.append((ids, output.text, broken[0] if broken else 8))
    assert any(decode(ids[:n]).endswith("\ufffd") for ids, _, n in ends)

    by_length = follow(story_llm, [replace(p, max_tokens=n) for p, (_, _, n) in zip(hot, ends, strict=True)])
    assert [output.text for output in by_length] == [decode(ids[:n]) for ids, _, n in ends]

    by_id = follow(story_llm, [replace(p, stop_token_ids=[ids[n]]) for p, (ids, _, n) in zip(hot, ends, strict=True)])
    for output, (ids, _, n) in zip(by_id, ends, strict=True):
        first = ids.index(ids[n])
        assert (output.text, output.token_ids) == (decode(ids[:first]), ids[: first + 1])
        assert (output.finish_reason, output.stop_reason) == ("stop", ids[n])

    stops = [text[len(text) // 2 :][:12] for _, text, _ in ends]  # over several tokens
    by_text = follow(story_llm, [replace(p, stop=stop) for p, stop in zip(hot, stops, strict=True)])
    for output, (ids, text, _), stop in zip(by_text, ends, stops, strict=True):
        assert (output.text, output.finish_reason, output.stop_reason) == (text[: text.index(stop)], "stop", stop)
        assert output.token_ids == ids[: len(output.token_ids)]
