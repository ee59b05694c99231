"""One suite for everything that generates: stages 1 to 7, and through an adapter the engine.

A subclass gives the fixtures `subject` (see `subject.Subject`) and `checkpoints`, and pytest does the rest. What is
right is Hugging Face's answer, by tests/oracle.py; so every test of invariance (batch, order, chunks, cache,
preemption) is a test against Hugging Face under other circumstances.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.core import SamplingParams
from tests import oracle
from tests.oracle_record import record_alone
from tests.stages.events import Listener
from tests.stages.requests import PROMPTS, TIGHT, Failing, greedy, random_prompts, story_prompts
from tests.stages.subject import Subject, needs
from tests.weights import lively_qwen3, random_llama, random_qwen2, with_nan_token


def run(
    subject: Subject,
    path: Path,
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams],
    **options: Any,
) -> list[list[int]]:
    """Greedy on a fresh engine, checked against HF, and idle afterwards. Returns the outputs."""
    engine = subject.engine(path, **options)
    outputs: list[list[int]] = engine.generate(prompts, params)
    oracle.check_greedy(path, prompts, outputs, params, lambda: subject.engine(path, **options))
    subject.check_idle(engine)
    return outputs


class Conformance:
    # --- greedy tokens are Hugging Face's ---

    @pytest.mark.parametrize("build", [lively_qwen3, random_llama, random_qwen2])
    def test_greedy_tokens_are_hf_s(self, subject: Subject, checkpoints: Path, build: Callable[..., Path]) -> None:
        params = [greedy(12)] * (len(PROMPTS) - 1) + [greedy(64, ignore_eos=True)]
        outputs = run(subject, build(checkpoints), PROMPTS, params, **TIGHT)
        oracle.check_lively(outputs[-1])

    def test_default_arguments(self, subject: Subject, checkpoints: Path) -> None:
        run(subject, lively_qwen3(checkpoints), random_prompts(40, 3, 17, seed=1), greedy(20))

    @pytest.mark.parametrize("number", [5, pytest.param(20, marks=pytest.mark.slow)])
    def test_stories_are_hf_s(self, subject: Subject, story_model: Path, number: int) -> None:
        """Openings x 64 tokens. Fewer of them where a step computes all keys again, or masked ones, too."""
        prompts = story_prompts(story_model)[: {1: 1, 6: 1 + number // 5}.get(subject.number, number)]
        for output in run(subject, story_model, prompts, greedy(64, ignore_eos=True), num_blocks=200):
            oracle.check_lively(output)

    @pytest.mark.slow
    def test_chats_are_hf_s(self, subject: Subject, smollm2: Path) -> None:
        """Five questions to SmolLM2-135M-Instruct x 64 tokens."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(smollm2)
        questions = [
            "Why is the sky blue?",
            "Write a short poem about the sea.",
            "What is the capital of Norway, and what is it known for?",
            "Explain in one sentence what a hash table is.",
            "Give me three ideas for a rainy afternoon.",
        ]
        prompts = []
        for question in questions:
            chat = [{"role": "user", "content": question}]
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            prompts.append(tokenizer.encode(text, add_special_tokens=False))
        run(subject, smollm2, prompts, greedy(64), num_blocks=64)

    def test_numerics_n1_logits_at_every_position(self, subject: Subject, checkpoints: Path) -> None:
        """Prefilled, in chunks or decoded: the logits at every position are those of HF's single forward."""
        path = random_llama(checkpoints)
        [prompt] = random_prompts(21)
        output, recorder = record_alone(subject.engine(path, **TIGHT), prompt, greedy(30, ignore_eos=True))
        known = prompt + output[:-1]
        ours = recorder.logits_by_position(known)
        assert sorted(ours) == list(range(len(known)))
        oracle.check_logits(torch.stack([ours[p] for p in range(len(known))]), oracle.truth(path).logits(known))

    # --- the same tokens under all circumstances ---

    @pytest.mark.parametrize("seats", [1, 2, 16])
    @needs("max_num_seqs")
    def test_any_batch_size(self, subject: Subject, checkpoints: Path, seats: int) -> None:
        run(subject, lively_qwen3(checkpoints), PROMPTS, greedy(10), **TIGHT | {"max_num_seqs": seats})

    def test_any_order_and_repeated(self, subject: Subject, checkpoints: Path) -> None:
        prompts = [PROMPTS[i] for i in (5, 0, 3, 3, 1, 5)]
        run(subject, lively_qwen3(checkpoints), prompts, greedy(7), **TIGHT)

    @pytest.mark.parametrize("block_size", [1, 2, 3, 16, 64])
    @needs("block_size")
    def test_any_block_size(self, subject: Subject, checkpoints: Path, block_size: int) -> None:
        options = TIGHT | {"block_size": block_size, "num_blocks": 192 // block_size}
        run(subject, lively_qwen3(checkpoints), PROMPTS, greedy(9), **options)

    @pytest.mark.parametrize("budget", [1, 2, 3, 7, 64])
    @needs("max_num_batched_tokens")
    def test_any_chunking(self, subject: Subject, checkpoints: Path, budget: int) -> None:
        run(subject, lively_qwen3(checkpoints), PROMPTS, greedy(9), **TIGHT | {"max_num_batched_tokens": budget})

    def test_cold_warm_and_warmer(self, subject: Subject, checkpoints: Path) -> None:
        """One engine, call after call: the same prompts, reordered, continued, and with a common beginning."""
        path = lively_qwen3(checkpoints)
        engine = subject.engine(path, **TIGHT)
        calls = [PROMPTS, PROMPTS[::-1], [PROMPTS[5][:12] + prompt for prompt in PROMPTS]]
        calls.append([prompt + out for prompt, out in zip(PROMPTS, engine.generate(PROMPTS, greedy(9)), strict=True)])
        for number, prompts in enumerate(calls):
            outputs = engine.generate(prompts, greedy(8))
            subject.check_idle(engine)
            history = [PROMPTS, *calls[:number]]
            oracle.check_greedy(path, prompts, outputs, greedy(8), lambda: subject.engine(path, **TIGHT), history)

    @needs("num_blocks")
    def test_a_pool_far_too_small(self, subject: Subject, checkpoints: Path) -> None:
        """Room for little more than the longest request alone; where blocks are taken on demand, some are preempted."""
        listener = Listener()
        options = TIGHT | {"num_blocks": 10, "max_num_seqs": 6, "on_event": listener}
        engine = subject.engine(lively_qwen3(checkpoints), **options)
        outputs = engine.generate(PROMPTS, greedy(16, ignore_eos=True))
        oracle.check_greedy(lively_qwen3(checkpoints), PROMPTS, outputs, greedy(16, ignore_eos=True))
        subject.check_idle(engine)
        if "max_num_batched_tokens" in subject.options:
            assert any(told.preempted for told in listener.requests.values())

    @needs("num_blocks")
    def test_engine_e3_a_nan_spoils_nobody_else(self, subject: Subject, checkpoints: Path) -> None:
        """Requests beside one whose keys and values are NaN, and after it in its blocks, are served as without it."""
        bad = 500
        path = with_nan_token(lively_qwen3(checkpoints), bad)
        healthy = [p for p in PROMPTS if bad not in p][:4]
        options = TIGHT | {"num_blocks": 40}
        expected = subject.engine(path, **options).generate(healthy, greedy(5, ignore_eos=True))
        engine = subject.engine(path, **options)
        for spoiled in ([bad, 3], [*range(20, 55), bad, 7, 9], [bad] * 30):
            found = engine.generate([spoiled, *healthy, spoiled], greedy(5, ignore_eos=True))
            assert found[1:-1] == expected
        assert engine.generate(healthy, greedy(5, ignore_eos=True)) == expected
        subject.check_idle(engine)

    # --- sampling ---

    def test_a_seed_fixes_the_tokens(self, subject: Subject, checkpoints: Path) -> None:
        """Alone, in any batch and order, in a tight pool, with neighbours that sample differently."""
        path = lively_qwen3(checkpoints)
        params = [SamplingParams(t, 12, seed=i) for i, t in enumerate((0.7, 1.0, 0.0, 1.5, 1.0, 0.3))]
        engine = subject.engine(path, **TIGHT)
        alone = [engine.generate([prompt], p)[0] for prompt, p in zip(PROMPTS, params, strict=True)]
        assert subject.engine(path, **TIGHT).generate(PROMPTS, params) == alone
        small = subject.engine(path, **TIGHT | {"num_blocks": 10, "max_num_seqs": 6, "max_num_batched_tokens": 7})
        assert small.generate(PROMPTS[::-1], params[::-1]) == alone[::-1]

    def test_seeds_matter(self, subject: Subject, checkpoints: Path) -> None:
        prompts = [PROMPTS[4]] * 6
        seeds = [1, 1, 2, None, None, 2**63 - 1]
        params = [SamplingParams(1.0, 16, ignore_eos=True, seed=seed) for seed in seeds]
        a, b, *others = subject.engine(lively_qwen3(checkpoints), **TIGHT).generate(prompts, params)
        assert a == b
        assert len({tuple(output) for output in (a, *others)}) == 5

    def test_sampled_frequencies_are_hf_s_odds(self, subject: Subject, checkpoints: Path) -> None:
        """Pairs of tokens, so that noise which does not change from one token to the next is noticed."""
        path = lively_qwen3(checkpoints, vocab_size=7, num_hidden_layers=1, hidden_size=32, seed=3)
        prompt, temperature, judge = [1, 2, 3], 1.3, oracle.truth(path)
        first = judge.probabilities(prompt, temperature)  # [7]
        second = [judge.probabilities([*prompt, token], temperature) for token in range(7)]
        odds = (first[:, None] * torch.stack(second)).flatten()  # [7 * 7]
        draws = 150 if subject.recomputes else 400
        params = [SamplingParams(temperature, 2, ignore_eos=True, seed=seed) for seed in range(draws)]
        engine = subject.engine(path, max_num_seqs=64, block_size=4, num_blocks=256, max_num_batched_tokens=256)
        pairs = engine.generate([prompt] * draws, params)
        oracle.check_distribution([7 * a + b for a, b in pairs], odds)

    # --- where outputs end ---

    def test_eos_ends_the_output_and_is_kept(self, subject: Subject, checkpoints: Path) -> None:
        """Each of several ids, in mid-output, as the first token, at the limit; in a prompt it means nothing."""
        plain = lively_qwen3(checkpoints)
        free = run(subject, plain, PROMPTS, greedy(12, ignore_eos=True), **TIGHT)
        eos = [free[0][5], free[3][0], free[5][11]]
        path = lively_qwen3(checkpoints, eos_token_ids=eos)
        assert oracle.truth(path).eos_token_ids == set(eos)
        outputs = run(subject, path, PROMPTS, greedy(12), **TIGHT)
        assert outputs[0] == free[0][: min(free[0].index(e) for e in eos if e in free[0]) + 1]
        assert outputs[3] == free[3][:1] and outputs[5][-1] in eos
        assert run(subject, path, PROMPTS, greedy(12, ignore_eos=True), **TIGHT) == free
        run(subject, path, [[eos[0], 5, eos[1]], [*PROMPTS[2], eos[2]]], greedy(6), **TIGHT)

    def test_scheduler_s7_every_request_has_its_own_parameters(self, subject: Subject, checkpoints: Path) -> None:
        """Twelve prompts, twelve different parameters, three seats: input order, own max_tokens, own EOS rule."""
        free = run(subject, lively_qwen3(checkpoints), PROMPTS[:1], greedy(12, ignore_eos=True), **TIGHT)[0]
        path = lively_qwen3(checkpoints, eos_token_ids=[free[3]])
        prompts = [[*p] for p in PROMPTS[:1] * 6 + PROMPTS]
        params = [greedy(n, ignore_eos=bool(n % 2)) for n in (8, 1, 3, 7, 2, 5, 11, 4, 10, 9, 6, 12)]
        outputs = run(subject, path, prompts, params, **TIGHT)
        assert [len(output) for output in outputs[:6]] == [
            min(p.max_tokens, 12 if p.ignore_eos else 4) for p in params[:6]
        ]

    # --- interruptions ---

    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
    def test_an_interruption_frees_everything(
        self, subject: Subject, checkpoints: Path, error: type[BaseException]
    ) -> None:
        """Ctrl-C or an error in mid-step, in prefill and in decode; afterwards the engine is as good as new."""
        path = lively_qwen3(checkpoints)
        engine = subject.engine(path, **TIGHT)
        model = engine.model
        for fatal_step in (1, 2, 4, 7):
            engine.model = Failing(model, fatal_step, error)
            with pytest.raises(error, match="planted"):
                engine.generate(PROMPTS, greedy(9, ignore_eos=True))
            subject.check_idle(engine)
            engine.model = model
            oracle.check_greedy(path, PROMPTS[2:], engine.generate(PROMPTS[2:], greedy(5)), greedy(5))

    # --- what it tells, and what bad input gets ---

    def test_events_tell_what_happened(self, subject: Subject, checkpoints: Path) -> None:
        listener = Listener(keeps_kv=not subject.recomputes)
        engine = subject.engine(lively_qwen3(checkpoints), **TIGHT, on_event=listener)
        params = [greedy(n) for n in (1, 9, 4, 12, 2, 7)]
        outputs = engine.generate(PROMPTS, params)
        listener.check_end(PROMPTS, outputs, params, engine.eos_token_ids)
        needed = sum(len(p) + len(o) - 1 for p, o in zip(PROMPTS, outputs, strict=True))
        assert subject.recomputes or listener.tokens_scheduled() == needed  # no prefix in common, nothing preempted

    def test_scheduler_s6_degenerate_requests(self, subject: Subject, checkpoints: Path) -> None:
        """Refused before anything starts, with the name, the value and the remedy; good neighbours are not begun."""
        events: list[Any] = []
        path = lively_qwen3(checkpoints)
        engine = subject.engine(path, **TIGHT, on_event=events.append)
        assert engine.generate([], greedy(4)) == [] == engine.generate([], [])
        refused: list[tuple[list[list[int]], Any, str]] = [
            ([[1], []], greedy(4), r"prompts\[1\] is empty"),
            ([[1], [2, 512]], greedy(4), r"prompts\[1\].*512"),
            ([[-1]], greedy(4), r"prompts\[0\].*-1"),
            ([[1], [2]], [greedy(4)], "params has 1 .* 2 prompts"),
            ([[1]], [greedy(4), greedy(4)], "params has 2 .* 1 prompts"),
            ([[1], [5] * 4000], greedy(97), r"prompts\[1\].*4000.*97"),
        ]
        for prompts, params, message in refused:
            with pytest.raises(ValueError, match=message):
                engine.generate(prompts, params)
        assert events == []
        subject.check_idle(engine)
        oracle.check_greedy(path, [[1, 511]], engine.generate([[1, 511]], greedy(4)), greedy(4))

    def test_unknown_arguments_are_type_errors(self, subject: Subject, checkpoints: Path) -> None:
        path = lively_qwen3(checkpoints)
        with pytest.raises(TypeError, match="max_sequences"):
            type(subject.engine(path))(path, max_sequences=3)
        with pytest.raises(TypeError, match="beam"):
            subject.engine(path).generate([[1]], greedy(2), beam=3)

    @needs("max_num_seqs")
    def test_sizes_below_one_are_refused(self, subject: Subject, checkpoints: Path) -> None:
        for name in subject.options & TIGHT.keys():
            for value in (0, -1):
                with pytest.raises(ValueError, match=f"{name}.*{value}"):
                    subject.engine(lively_qwen3(checkpoints), **{name: value})

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
    def test_a_gpu_that_is_not_there(self, subject: Subject, checkpoints: Path) -> None:
        with pytest.raises(ValueError, match=r"device='cuda'.*cpu"):
            subject.engine(lively_qwen3(checkpoints), device="cuda")
