"""`prompt_logprobs` with real models: against Hugging Face, in any chunks, after preemption, with a cache."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanovllm import LLM, AsyncLLM, RequestOutput, SamplingParams
from nanovllm.runner import prompt_logprobs
from tests.engine.helpers import BOTH
from tests.engine.test_llm_invariance import PROMPT, STORY_MODEL, make
from tests.weights import lively_qwen3

N = 3
SCORED = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=N)
PLAIN = SCORED.changed(prompt_logprobs=None)
Check = Callable[[RequestOutput, int], None]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively_qwen3(tmp_path_factory.getbasetemp() / "engine-checkpoints")


def checker(path: Path) -> Check:
    """Compares outputs with the log-softmax of Hugging Face's model in float32."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def check(output: RequestOutput, n: int = N) -> None:
        prompt = output.prompt_token_ids
        with torch.inference_mode():
            logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        found = output.prompt_logprobs
        assert found is not None and len(found) == len(prompt) and found[0] is None
        for token, entry, expected in zip(prompt[1:], found[1:], logprobs, strict=False):
            assert entry is not None
            top = expected.topk(n).indices.tolist()
            assert list(entry) == list(dict.fromkeys([token, *top]))
            values = [entry[id].logprob for id in entry]
            assert values == pytest.approx(expected[list(entry)].tolist(), abs=1e-3)
            above = [int((expected > expected[token] + shift).sum()) for shift in (1e-4, -1e-4)]
            rank = entry[token].rank
            assert rank is not None and above[0] < rank <= above[1]  # itself among them
            assert [entry[id].rank for id in top] == list(range(1, n + 1))

    return check


@pytest.fixture(scope="module")
def check(tiny: Path) -> Check:
    return checker(tiny)


def generate(llm: LLM, prompts: list[list[int]], params: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize(
    ("budget", "asynchronous"),
    [(64, False), (5, True), *(pytest.param(b, a, marks=pytest.mark.slow) for b in (1, 2, 7) for a in (False, True))],
)
def test_chunks_of_any_size(tiny: Path, check: Check, budget: int, asynchronous: bool) -> None:
    """Beside a request that asks for nothing, and one that asks for more; cold and then warm."""
    prompts = [PROMPT, PROMPT[:3], PROMPT[:9], [7]]
    params = [SCORED, PLAIN, SCORED.changed(prompt_logprobs=N + 4), SCORED]
    with make(tiny, max_num_batched_tokens=budget, async_scheduling=asynchronous) as llm:
        for _ in range(2):
            outputs = generate(llm, prompts, params)
            check(outputs[0], N)
            check(outputs[2], N + 4)
            assert outputs[1].prompt_logprobs is None and outputs[3].prompt_logprobs == [None]
            assert [output.num_cached_tokens for output in outputs] == [0] * 4
        after = generate(llm, [PROMPT], PLAIN)[0]
        assert after.num_cached_tokens == 20 and after.outputs[0].token_ids == outputs[0].outputs[0].token_ids


@BOTH
@pytest.mark.parametrize("caching", [False, True])
def test_a_preempted_prompt_is_scored_once(tiny: Path, check: Check, caching: bool, asynchronous: bool) -> None:
    tight = {"kvcache_block_size": 2, "num_kv_blocks": 12, "max_num_batched_tokens": 5}
    prompts = [[i, *PROMPT[:8]] for i in range(2)]
    with make(tiny, **tight, enable_prefix_caching=caching, async_scheduling=asynchronous) as llm:
        outputs = generate(llm, prompts, SCORED.changed(max_tokens=12))
    for output in outputs:
        check(output, N)
    assert sum(output.metrics.num_preemptions for output in outputs)


@BOTH
@pytest.mark.parametrize("caching", [False, True])
def test_a_prompt_preempted_in_its_middle(tiny: Path, check: Check, caching: bool, asynchronous: bool) -> None:
    """By a request of a better priority, which takes the only seat. Then it goes on, from its own blocks if they are
    still there: what was scored need not be computed again."""
    config = {"max_num_seqs": 1, "max_num_batched_tokens": 5, "enable_prefix_caching": caching}
    cached: list[int] = []

    def note(event: dict[str, Any]) -> None:
        if event["type"] == "admitted" and event["request"] == "scored":
            cached.append(event["cached"])

    with make(tiny, **config, async_scheduling=asynchronous, on_event=note) as llm:
        generate(llm, [PROMPT], PLAIN)
        llm.engine.add_request("scored", PROMPT, SCORED, priority=1)
        for _ in range(3):
            llm.engine.step()
        llm.engine.add_request("urgent", [9, 8], PLAIN)
        done: list[RequestOutput] = []
        while llm.engine.has_unfinished():
            done += [output for output in llm.engine.step() if output.finished]
    assert [output.request_id for output in done] == ["urgent", "scored"]
    assert cached == [0, 20 if caching else 0]
    check(done[1], N)


def test_choices_share_the_scores_of_the_first(tiny: Path, check: Check) -> None:
    params = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=3, ignore_eos=True, prompt_logprobs=N, logprobs=1)
    events: list[dict[str, Any]] = []
    with make(tiny, on_event=events.append) as llm:
        for prompt in PROMPT, PROMPT[:3]:
            output = generate(llm, [prompt], params)[0]
            check(output, N)
            assert len({tuple(choice.token_ids) for choice in output.outputs}) > 1
    assert [e["cached"] for e in events if e["type"] == "admitted"] == [0, 20, 20, 0, 0, 0]


def test_pieces_of_bounded_memory(tiny: Path, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, and never the logits of more positions at a time than a piece has."""
    sizes: list[int] = []
    score = prompt_logprobs.score_piece

    def noted(hidden: torch.Tensor, *arguments: Any) -> Any:
        sizes.append(len(hidden))
        return score(hidden, *arguments)

    monkeypatch.setattr(prompt_logprobs, "score_piece", noted)
    with make(tiny) as llm:
        monkeypatch.setattr(prompt_logprobs, "PIECE", 4 * (llm.engine.vocab_size + 6 * N) + 1)
        outputs = generate(llm, [PROMPT, PROMPT[:5]], SCORED)
    for output in outputs:
        check(output, N)
    assert max(sizes) == 4 and sum(sizes) == 22 + 4


def test_beside_speculation(tiny: Path, check: Check) -> None:
    with make(tiny, speculative={"method": "ngram", "k": 3}) as llm:
        outputs = generate(llm, [PROMPT * 2, PROMPT[:5]], SCORED.changed(max_tokens=9))
    for output in outputs:
        check(output, N)


def test_the_texts_joined_are_the_prompt() -> None:
    prompt = "Once upon a time there was a naïve 🦊 who"
    with LLM(STORY_MODEL) as llm:
        output = generate(llm, [prompt], SCORED)[0]  # type: ignore[list-item]
    assert output.prompt_logprobs is not None
    texts = [
        entry[token].decoded_token
        for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        if entry is not None
    ]
    assert all(text is not None for text in texts)
    assert prompt.endswith("".join(text or "" for text in texts)) and len("".join(map(str, texts))) > 30


def test_streams_have_them_from_the_first_token_on(tiny: Path, check: Check) -> None:
    async def run() -> list[RequestOutput]:
        sizes: dict[str, Any] = {"kvcache_block_size": 4, "num_kv_blocks": 60, "max_model_len": 200}
        async with AsyncLLM(tiny, skip_tokenizer_init=True, max_num_batched_tokens=8, **sizes) as llm:
            return [output async for output in llm.generate({"prompt_token_ids": PROMPT}, SCORED)]

    outputs = asyncio.run(run())
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == 4
    for output in outputs:
        check(output, N)


@pytest.mark.gpu
@BOTH
def test_on_a_gpu_among_recorded_steps(asynchronous: bool) -> None:
    """Decodes, which are replayed, go on in steps that score, which are launched. The kernel finds what is likely."""
    check = checker(STORY_MODEL)
    sizes = {"kvcache_block_size": 16, "num_kv_blocks": 60, "max_num_batched_tokens": 16}
    prompts = [[1, 2, 3], *([i, *PROMPT] for i in range(4, 8))]
    params = [PLAIN.changed(max_tokens=20), *(SCORED.changed(prompt_logprobs=i) for i in range(1, 5))]
    with make(STORY_MODEL, device="cuda", dtype="float32", **sizes, async_scheduling=asynchronous) as llm:
        outputs = generate(llm, prompts, params)
        alone = generate(llm, prompts[:1], params[0])
    assert outputs[0].outputs[0].token_ids == alone[0].outputs[0].token_ids
    for output, p in zip(outputs[1:], params[1:], strict=True):
        assert p.prompt_logprobs is not None
        check(output, p.prompt_logprobs)
