"""Structured outputs, many of them, in every way in which an engine can run: the tokens are the same."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.kernels import FusedKernels
from nanovllm.runner import model_runner
from nanovllm.sampling import sampler
from nanovllm.sampling.state import SamplingState
from nanovllm.text.grammars import TokenGrammars
from tests.engine.structured import (
    DRAFT,
    KINDS,
    NGRAM,
    SMALL,
    STORIES,
    STORY_MODEL,
    TIGHT,
    asynchronous,
    check,
    generate,
    ids,
    llm,
    mixed,
    model,
    story,
)

__all__ = ["asynchronous", "llm", "model", "story"]  # fixtures


@pytest.mark.slow
def test_the_kernels_of_a_gpu_honour_the_masks(llm: LLM, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter. With guesses, whose masks are not of rows, PyTorch draws."""
    pytest.importorskip("triton")
    from nanovllm.kernels.fused.edits import edit_logits, restore_logits
    from nanovllm.kernels.fused.sample import sample_rows

    drawn = []

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        drawn.append(options)
        return sample_rows(*args, **options)

    fused = FusedKernels(sample_rows=counted, edit_logits=edit_logits, restore_logits=restore_logits)
    asked = [one for one in mixed(seed=6, max_tokens=3) if one[0] == "regex"]
    asked.append((None, SamplingParams(seed=6, max_tokens=3)))
    words = [*range(30, 60), 0]
    both = StructuredOutputsParams(regex="[A-Za-z]{3}")
    asked.append((None, SamplingParams(structured_outputs=both, allowed_token_ids=words, seed=1, logprobs=0)))
    expected = ids(generate(llm, asked))
    assert set(expected[-1]) <= set(words)
    for module in (sampler, model_runner):
        monkeypatch.setattr(module, "fused_kernels", lambda device: fused)
    with LLM(model, **SMALL) as other:
        assert other.engine.executor.runner.state.in_kernels
        assert ids(generate(other, asked)) == expected and drawn
    with LLM(model, **SMALL, speculative=NGRAM) as guessing:
        assert ids(generate(guessing, asked)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7, 5.0])
def test_outputs_match_whatever_the_temperature(llm: LLM, asynchronous: LLM, story: LLM, temperature: float) -> None:
    for seed in (100, 200):
        found = generate(llm, asked := mixed(seed, temperature, n=12))
        assert ids(generate(asynchronous, asked)) == ids(found)
    generate(story, mixed(300, temperature, n=6))


@pytest.mark.slow
def test_what_is_drawn_without_a_mask_is_drawn_with_it(llm: LLM, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are the same as with a mask for every row, and fewer masks are filled, unless there are filters. On a CPU
    penalties need masks as filters do."""
    filled, fill = list[int](), TokenGrammars.fill

    def noting(self: TokenGrammars, wanted: Any) -> bytearray:
        filled.append(len(wanted))
        return fill(self, wanted)

    text = StructuredOutputsParams(regex="[A-Za-z ,.]{40,60}")
    llm.generate(STORIES[:6], SamplingParams(structured_outputs=text, max_tokens=1), use_tqdm=False)  # compiled
    monkeypatch.setattr(TokenGrammars, "fill", noting)
    share = {}
    options: dict[str, dict[str, Any]] = {
        "plain": {}, "greedy": {"temperature": 0.0, "top_k": 2}, "filtered": {"top_k": 500, "min_p": 1e-9},
        "penalised": {"presence_penalty": 0.5}, "scored": {"logprobs": 2},
    }  # fmt: skip
    for name, more in options.items():
        structured = {"structured_outputs": text, "max_tokens": 40}
        params = [SamplingParams(**{"temperature": 1.0, **structured, **more}, seed=i) for i in range(6)]
        found = [llm.generate(STORIES[:6], params, use_tqdm=False)]
        share[name] = sum(filled) / sum(len(output.outputs[0].token_ids) for output in found[0])
        with monkeypatch.context() as patch:
            patch.setattr(SamplingState, "is_unfiltered", lambda self, row: False)
            found.append(llm.generate(STORIES[:6], params, use_tqdm=False))
        assert ids(found[0]) == ids(found[1])
        filled.clear()
    assert share["plain"] == share["scored"] < 0.9 and share["greedy"] < 1, share
    assert share["filtered"] == share["penalised"] == 1, share


WAYS: dict[str, dict[str, Any]] = {
    "preempted": TIGHT,
    "preempted, asynchronous": TIGHT | {"async_scheduling": True},
    "tiny chunks, asynchronous": SMALL | {"max_num_batched_tokens": 9, "max_num_seqs": 8, "async_scheduling": True},
    "no prefix cache": SMALL | {"enable_prefix_caching": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_tokens_do_not_depend_on_how_the_engine_runs(llm: LLM, model: Path, way: str) -> None:
    with LLM(model, **WAYS[way]) as other:
        for seed in range(2):
            asked = mixed(seed, n=3)
            found = generate(other, asked)
            assert ids(found) == ids(generate(llm, asked))
            if "preempted" in way:
                assert sum(output.metrics.num_preemptions for output in found) > 0
            again = generate(other, asked)
            assert ids(again) == ids(found)
            cached = sum(output.num_cached_tokens for output in again)
            assert cached > 0 or way == "no prefix cache" or "preempted" in way


@pytest.mark.slow
@pytest.mark.parametrize("config", [SMALL, TIGHT], ids=["roomy", "tight"])
def test_ngram_guesses_change_no_structured_token(llm: LLM, model: Path, config: dict[str, Any]) -> None:
    with LLM(model, **config, speculative=NGRAM) as other:
        for seed in range(3):
            asked = mixed(seed, temperature=0.8, n=3)
            assert ids(generate(other, asked)) == ids(generate(llm, asked))
        assert sum(other.engine.scheduler.speculation.accepted) > 0


@pytest.mark.slow
def test_a_drafts_guesses_match_too(story: LLM) -> None:
    with (
        LLM(STORY_MODEL, **SMALL, speculative=DRAFT) as roomy,
        LLM(STORY_MODEL, **TIGHT, speculative=DRAFT | {"k": 2}) as tight,
    ):
        asked = mixed(0, temperature=0.8)
        assert ids(generate(roomy, asked)) == ids(generate(tight, asked)), "k and preemptions do not matter"
        greedy = mixed(0, temperature=0.0)
        assert ids(generate(roomy, greedy)) == ids(generate(story, greedy))
        assert sum(roomy.engine.scheduler.speculation.accepted) > 0


@pytest.mark.slow
def test_a_drafts_guesses_leave_the_distribution_alone(story: LLM) -> None:
    """Which of six words: by chi-square against the target without guesses, whose seeds mean other noise."""
    words = StructuredOutputsParams(regex="(Tom|Anna|Zoe)(ab|cd)")
    params = SamplingParams(structured_outputs=words, seed=1, temperature=3.0, n=240)
    counts = []
    with LLM(STORY_MODEL, **SMALL, speculative=DRAFT) as guessing:
        for engine in (story, guessing):
            [output] = engine.generate(STORIES[0], params, use_tqdm=False)
            counts.append(Counter(choice.text for choice in output.outputs))
    one, other = counts
    statistic = sum((one[text] - other[text]) ** 2 / (one[text] + other[text]) for text in one | other)
    assert len(one) >= 4 and statistic < 25, counts  # with 5 degrees of freedom, 0.01% lie beyond


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
def test_two_ranks_give_the_same_tokens(llm: LLM, model: Path, overlap: bool) -> None:
    ranks: dict[str, Any] = {"tensor_parallel_size": 2, "device": "cpu", "dtype": "float32"}
    with LLM(model, **SMALL | {"async_scheduling": overlap}, **ranks) as two:
        for seed in range(2):
            asked = mixed(seed, n=2)
            expected = ids(generate(llm, asked))
            assert ids(generate(two, asked)) == expected
        # Given up between the model and its tokens, on every rank
        assert two.engine.grammars is not None
        two.engine.add_request("a", [1, 2, 3], asked[1][1])
        fill = two.engine.grammars.fill
        two.engine.grammars.fill = None
        with pytest.raises(TypeError):
            two.engine.step()
        two.engine.abort_all()
        two.engine.grammars.fill = fill
        assert ids(generate(two, asked)) == expected


@pytest.mark.slow
def test_a_draft_on_two_ranks() -> None:
    ranks: dict[str, Any] = {"tensor_parallel_size": 2, "device": "cpu", "dtype": "float32"}
    with (
        LLM(STORY_MODEL, **SMALL, speculative=DRAFT) as one,
        LLM(STORY_MODEL, **SMALL, **ranks, speculative=DRAFT) as two,
    ):
        asked = mixed(5, max_tokens=25)
        assert ids(generate(two, asked)) == ids(generate(one, asked))


@pytest.mark.slow
def test_aborts_in_the_middle(llm: LLM, asynchronous: LLM) -> None:
    kinds = [*KINDS]
    for engine in (llm.engine, asynchronous.engine):
        for steps in range(1, 5):
            for i, (_, params) in enumerate(mixed(seed=steps)):
                engine.add_request(str(i), llm.encode({"prompt": STORIES[i]}), params)
            for _ in range(steps):
                engine.step()
            for i in (1, 4, 0):
                engine.abort_request(str(i))
            while engine.has_unfinished():
                for output in engine.step():
                    if output.finished and output.request_id in "235":
                        check(kinds[int(output.request_id) - 1], output)
            assert engine.scheduler.num_matchers == 0


@pytest.mark.slow
def test_an_instruction_model_answers_in_json(smollm2: Path) -> None:
    question = [{"role": "user", "content": "Invent a person. Answer in JSON with name, age and tags."}]
    asked = [
        SamplingParams(temperature=temperature, seed=1, max_tokens=80, structured_outputs=structure)
        for temperature in (0.0, 0.7, 1.5)
        for structure in KINDS.values()
    ]
    with LLM(smollm2, max_model_len=200, num_kv_blocks=200, async_scheduling=True) as llm:
        found = llm.chat([question] * len(asked), asked, use_tqdm=False)
    for kind, output in zip([*KINDS] * 3, found, strict=True):
        check(kind, output, llm.engine.eos_token_ids)
    assert sum(output.outputs[0].finish_reason == "stop" for output in found) >= 12
