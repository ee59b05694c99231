"""X2: speculation with real models. Greedy output is that without it, whoever guesses and however well."""

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine.sequence import Sequence
from tests.engine.adapter import EngineSubject
from tests.stages.requests import PROMPTS, TIGHT, greedy
from tests.weights import lively_qwen3

pytestmark = pytest.mark.slow  # the fast tier has the random histories and the chi-square tests

ROOT = Path(__file__).parents[2]
DRAFT = {"model": ROOT / "assets" / "story_draft", "k": 4}
NGRAM = {"method": "ngram", "k": 4, "n": 2}
STORIES: list[str] = json.loads((ROOT / "tests" / "data" / "story_prompts.json").read_text(encoding="utf-8"))["prompts"]
SMALL = {"kvcache_block_size": 4, "num_kv_blocks": 60, "max_num_seqs": 4, "max_num_batched_tokens": 40}


def outputs(params: Any, **config: Any) -> tuple[Any, LLM]:
    llm = LLM(**{"kv_cache_gib": 0.05} | config)
    return llm.generate(STORIES[:6], params, use_tqdm=False), llm


def ids(found: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in found]


@pytest.mark.parametrize("speculative", [DRAFT, NGRAM, DRAFT | {"k": 9}], ids=["draft", "ngram", "far"])
def test_x2_greedy_output_is_the_same(speculative: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=1)
    plain, _ = outputs(params, **SMALL)
    found, llm = outputs(params, **SMALL, speculative=speculative)
    assert ids(found) == ids(plain) and llm.engine.scheduler.speculation.num_steps
    for a, b in zip(found, plain, strict=True):
        assert a.outputs[0].text == b.outputs[0].text
        assert a.outputs[0].cumulative_logprob == pytest.approx(b.outputs[0].cumulative_logprob, abs=1e-3)


def test_sampled_tokens_depend_neither_on_k_nor_on_preemptions() -> None:
    params = SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.1, min_tokens=8, seed=5, max_tokens=40)
    roomy, _ = outputs(params, speculative=DRAFT)
    tight, llm = outputs(params, **SMALL | {"num_kv_blocks": 32}, speculative=DRAFT | {"k": 2})
    assert ids(roomy) == ids(tight)
    assert sum(output.metrics.num_preemptions for output in tight)
    assert llm.engine.scheduler.blocks.num_free == 32


def test_ngram_guesses_change_no_sampled_token() -> None:
    params = SamplingParams(temperature=0.8, top_k=20, presence_penalty=0.5, seed=5, max_tokens=40)
    assert ids(outputs(params, **SMALL)[0]) == ids(outputs(params, **SMALL, speculative=NGRAM)[0])


def test_a_stop_string_cuts_an_accepted_run() -> None:
    plain, _ = outputs(SamplingParams(temperature=0, max_tokens=40))
    stop = [output.outputs[0].text[20:24] for output in plain]
    params = [SamplingParams(temperature=0, max_tokens=40, stop=s, logprobs=0) for s in stop]
    one, many = outputs(params)[0], outputs(params, speculative={"method": "ngram", "k": 8, "n": 1})[0]
    for a, b in zip(one, many, strict=True):
        x, y = a.outputs[0], b.outputs[0]
        assert (x.text, x.token_ids, x.stop_reason) == (y.text, y.token_ids, y.stop_reason)
        assert y.logprobs is not None and len(y.logprobs) == len(y.token_ids)


def test_the_embedded_pair_agrees_and_saves_the_steps_that_theory_says() -> None:
    k = 4
    _, llm = outputs(SamplingParams(temperature=0, max_tokens=100, ignore_eos=True), speculative=DRAFT | {"k": k})
    stats = llm.engine.scheduler.speculation
    # A guess is looked at if all before it were right.
    looked_at = stats.proposed[0] + sum(stats.accepted[:-1])
    acceptance = sum(stats.accepted) / looked_at
    assert acceptance > 0.6
    assert stats.mean_accepted_length == pytest.approx((1 - acceptance ** (k + 1)) / (1 - acceptance), rel=0.15)


def test_what_is_drawn_is_distributed_as_the_targets_tokens() -> None:
    """1,500 draws through scheduler, draft and target: the first token of each, and the second after the usual first,
    against the target's own probabilities."""
    likeliest = SamplingParams(temperature=0, max_tokens=1, logprobs=8)
    target = LLM(kv_cache_gib=0.05)
    assert target.tokenizer is not None
    start = target.tokenizer.encode("In the village of")
    params = SamplingParams(temperature=1.2, top_k=8, max_tokens=3, n=1500, seed=1, ignore_eos=True)
    llm = LLM(kv_cache_gib=0.3, speculative=DRAFT | {"k": 2})
    [output] = llm.generate([start], params, use_tqdm=False)
    drawn = [choice.token_ids for choice in output.outputs]
    stats = llm.engine.scheduler.speculation
    assert 0.1 < sum(stats.accepted) / sum(stats.proposed) < 0.9  # both ways to a token are taken often
    usual = Counter(ids[0] for ids in drawn).most_common(1)[0][0]
    for prefix in ([], [usual]):
        [found] = target.generate([[*start, *prefix]], likeliest, use_tqdm=False)
        assert found.outputs[0].logprobs is not None
        weights = {t: math.exp(p.logprob / 1.2) for t, p in found.outputs[0].logprobs[0].items()}
        counts = Counter(ids[len(prefix)] for ids in drawn if ids[: len(prefix)] == prefix)
        assert counts.keys() <= weights.keys()
        expected = {t: w / sum(weights.values()) * counts.total() for t, w in weights.items()}
        assert sum((counts[t] - e) ** 2 / e for t, e in expected.items()) < 40  # 7 degrees of freedom: one in a million


@pytest.mark.parametrize("speculative", [DRAFT, NGRAM], ids=["draft", "ngram"])
def test_two_ranks_guess_and_draw_as_one(speculative: dict[str, Any]) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.5},
        {"temperature": 1.0, "logprobs": 2},
    ]
    params = [SamplingParams(**kinds[i % 3], seed=i, max_tokens=20, ignore_eos=True) for i in range(6)]
    one, alone = outputs(params, **SMALL, speculative=speculative)
    two, both = outputs(params, **SMALL, speculative=speculative, tensor_parallel_size=2)
    assert ids(two) == ids(one)
    assert both.engine.scheduler.speculation == alone.engine.scheduler.speculation
    both.close()


class Replay:
    """Guesses what is known to come, right or wrong by a pattern."""

    def __init__(self, known: list[list[int]], right: Callable[[int], bool]) -> None:
        self.known, self.right = known, right

    def propose(self, seq: Sequence, k: int) -> list[int | None]:
        first = seq.num_output_tokens
        coming = self.known[int(seq.request_id)][first : first + k]
        return [t if self.right(first + i) else (t + 1) % 512 for i, t in enumerate(coming)]


@pytest.mark.parametrize("right", [lambda i: True, lambda i: False, lambda i: i % 3 != 0], ids=["all", "none", "mixed"])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_x2_any_guesses_across_block_borders(
    tmp_path_factory: pytest.TempPathFactory, right: Callable[[int], bool], block_size: int
) -> None:
    path = lively_qwen3(tmp_path_factory.getbasetemp() / "engine-checkpoints")
    options: dict[str, Any] = {**TIGHT, "block_size": block_size, "num_blocks": -(-60 // block_size)}
    params = greedy(16, ignore_eos=True)
    plain = EngineSubject().engine(path, **options).generate(PROMPTS, params)
    subject = EngineSubject({"speculative": {"method": "ngram", "k": 5}})
    engine = subject.engine(path, **options)
    engine.llm.engine.scheduler.proposer = Replay(plain, right)
    assert engine.generate(PROMPTS, params) == plain
    subject.check_idle(engine)


@pytest.mark.parametrize(
    ("speculative", "message"),
    [
        ({"model": "x", "k": 0}, r"speculative\['k'\].* from 1 to 256; got 0"),
        ({"model": "x", "k": 10**9}, r"speculative\['k'\].* from 1 to 256; got 10"),
        ({"method": "ngram", "n": 0}, r"speculative\['n'\].*got 0"),
        ({"method": "magic"}, "'draft' or 'ngram'; got 'magic'"),
        ({"method": "ngram", "depth": 3}, "no key 'depth'"),
        ({"k": 3}, "'model'"),
        ({"model": "nowhere"}, r"speculative\['model'\].*nowhere"),
    ],
)
def test_what_makes_no_sense_is_refused(speculative: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(speculative=speculative, kv_cache_gib=0.05)


def test_the_context_is_as_long_as_both_models_allow(tmp_path: Path) -> None:
    target = lively_qwen3(tmp_path / "target", num_hidden_layers=1)
    draft = lively_qwen3(tmp_path / "draft", num_hidden_layers=1, max_position_embeddings=64)
    options: dict[str, Any] = {"speculative": {"model": draft}, "kv_cache_gib": 0.05, "skip_tokenizer_init": True}
    with pytest.raises(ValueError, match="max_model_len=65 is more than model and draft both have, 64"):
        LLM(target, **options, max_model_len=65)
    with pytest.raises(ValueError, match="is more than the model's "):
        LLM(target, **options | {"speculative": NGRAM}, max_model_len=10**6)
    llm = LLM(target, **options)
    [output] = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == llm.engine.config.max_model_len - 3 == 61


def test_other_vocabularies_and_asynchronous_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"vocabulary of 512 tokens.*target one of"):
        LLM(speculative={"model": lively_qwen3(tmp_path)}, kv_cache_gib=0.05)
    with pytest.raises(ValueError, match="async_scheduling=True"):
        LLM(speculative=NGRAM, async_scheduling=True)
