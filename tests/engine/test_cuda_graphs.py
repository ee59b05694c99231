"""Recorded decode steps. On a CPU through the same code, with a stand-in that runs the step anew; for real on a GPU."""

import gc
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.engine.speculation import ReplayProposer
from nanovllm import LLM, SamplingParams
from nanovllm.engine.plan import Scheduled
from nanovllm.graphs import sizes
from nanovllm.graphs.cuda_graph import record_nothing
from nanovllm.graphs.decode_steps import DecodeSteps
from nanovllm.graphs.prompt_steps import RecordedSteps
from nanovllm.graphs.sizes import StepSizes, batch_sizes
from nanovllm.llm import EMBEDDED_MODEL
from nanovllm.pinned import Writes, host_buffers
from nanovllm.runner.batch import Batch, DecodeInputs
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.rows import Rows
from nanovllm.sampling.sampler import Sampled
from nanovllm.workers import executor
from tests.stages.requests import PROMPTS
from tests.weights import VOCAB, lively_qwen3

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOKENS = 18
DEFAULTS: dict[str, Any] = {
    "skip_tokenizer_init": True, "num_kv_blocks": 60, "kvcache_block_size": 16, "max_num_seqs": 6, "max_model_len": 128,
}  # fmt: skip


@pytest.fixture
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "graph-checkpoints"


def make_llm(path: Path, device: str, monkeypatch: pytest.MonkeyPatch, **config: Any) -> LLM:
    """fp32, with recorded decode steps."""
    if device == "cpu":
        monkeypatch.setattr(executor, "ModelRunner", partial(ModelRunner, recorder=record_nothing))
    llm = LLM(path, device=device, dtype="float32", **DEFAULTS | config)
    monkeypatch.setattr(executor, "ModelRunner", ModelRunner)
    return llm


def runner_of(llm: LLM) -> ModelRunner:
    runner: ModelRunner = llm.engine.executor.runner
    return runner


def tokens_of(llm: LLM, prompts: list[list[int]], params: Any) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def mixed_params(n: int) -> list[SamplingParams]:
    """Greedy, plain and full tails side by side, with lengths that let the batch shrink step by step."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.7},
        {"temperature": 0.0, "repetition_penalty": 1.5, "logprobs": 2},
    ]
    return [SamplingParams(**kinds[i % 4], seed=i, max_tokens=TOKENS - 2 * (i % 9), ignore_eos=True) for i in range(n)]


@pytest.mark.parametrize("largest", [*range(1, 41), 100, 256, 257, 300, 512])
def test_every_batch_size_has_a_recording(largest: int) -> None:
    for more in (0, largest, 256, 300):
        sizes = batch_sizes(largest, more)
        assert sizes == sorted(set(sizes)) and sizes[-1] == max(largest, more) and sizes[0] == 1
        for n in range(1, sizes[-1] + 1):
            chosen = min(s for s in sizes if s >= n)
            assert chosen - n <= 15 if n <= largest else chosen < 2 * n


def test_a_batch_has_nothing_of_the_steps_before() -> None:
    """Rows in the order of the plan, each at its own position; behind them the scratch row at position 0, where it
    reads a single key, however the batch grows and shrinks."""
    rows = Rows(6, 128, 16, 60, torch.device("cpu"))
    inputs, batches = DecodeInputs(rows, 6), list[Batch]()

    def step(numbers: torch.Tensor) -> Sampled:
        batches.append(batch := inputs.look_up(numbers))
        size = len(batch.positions)
        zeros = torch.zeros(size, 1)
        return Sampled(batch.sampled_rows, batch.next_positions, torch.arange(size), zeros, zeros)

    recorded = DecodeSteps(StepSizes([1, 2, 4, 6], [], 0, 0, []), rows.token_ids, step, record_nothing, copies=3)
    for i, order in enumerate([[5, 2, 0, 3, 1, 4], [5, 0, 3], [3, 0, 5, 1], [0], [2, 5], [4, 1, 2]] * 2):
        places = [9 + 17 * row + i for row in order]
        work = zip(order, places, strict=True)
        replayed = recorded.replay([Scheduled(7, row, place, 1, sample=True, new_blocks=()) for row, place in work])
        batch = batches[-1]
        assert len(batch.positions) == {1: 1, 2: 2, 3: 4, 4: 4, 6: 6}[len(order)]
        missing = len(batch.positions) - len(order)
        assert batch.sampled_rows.tolist() == order + [rows.scratch_row] * missing
        assert batch.attention.context_len.tolist() == [place + 1 for place in places] + [1] * missing
        assert replayed is not None and replayed.rows.tolist() == order
        assert replayed.positions.tolist() == [place + 1 for place in places]
        assert [len(tensor) for tensor in replayed if tensor is not None] == [len(order)] * 5


def test_buffers_on_the_host_take_turns() -> None:
    """The next steps are written while a copy from this one's may be under way."""
    buffers = host_buffers(5, 3, torch.device("cpu"))
    places = [next(buffers).data_ptr() for _ in range(6)]
    assert len(set(places)) == 3 and places[:3] == places[3:]


def test_writes_reach_their_part_of_the_memory() -> None:
    """Also of a memory that is itself a part of another one. Nothing is written before it is sent, or twice."""
    whole = torch.zeros(12, dtype=torch.int32)
    memory = whole[2:]
    writes, parts = Writes(memory), [memory[:4].view(2, 2), memory[4:]]
    for part, values in zip(parts, ([7, 8], [9, 5]), strict=True):
        writes.add(part, np.array([3, 1]), np.array(values, dtype=np.int32))
    assert not whole.any()
    writes.send()
    assert whole.tolist() == [0, 0, 0, 8, 0, 7, 0, 5, 0, 9, 0, 0]
    whole.zero_()
    writes.send()
    assert not whole.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("overlapped", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("most", [0, 40, 256], ids=lambda most: f"{most} tokens")
def test_tokens_are_those_of_the_plain_loop(
    device: str, overlapped: bool, most: int, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All batch sizes from 6 down to 1 and up again, prompts joining in between, all kinds of sampling; no step with a
    prompt replayed, or the small ones, or all."""
    monkeypatch.setattr(sizes, "MAX_REPLAYED", most)
    path = lively_qwen3(checkpoints)
    prompts = [[*p[:20], i] for i, p in enumerate((PROMPTS * 4)[:8])]
    params = mixed_params(len(prompts))
    recorded = make_llm(path, device, monkeypatch, async_scheduling=overlapped)
    assert runner_of(recorded).recorded is not None
    plain = LLM(path, device=device, dtype="float32", enforce_eager=True, **DEFAULTS)
    assert runner_of(plain).recorded is None
    expected = tokens_of(plain, prompts, params)
    assert len({t for tokens in expected for t in tokens}) > 20
    for _ in range(2):  # the second time from the prefix cache
        assert tokens_of(recorded, prompts, params) == expected


@pytest.mark.parametrize("device", DEVICES)
def test_recordings_are_used(device: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of 3 takes the recording of 4, their prompts of 10 tokens that of 12."""
    seen = []
    llm = make_llm(lively_qwen3(checkpoints), device, monkeypatch)
    load = DecodeSteps.load

    def counting(self: DecodeSteps, size: int, tokens: Any) -> None:
        seen.append((tokens.shape[1], size))
        load(self, size, tokens)

    monkeypatch.setattr(DecodeSteps, "load", counting)
    tokens_of(llm, [p[:9] for p in PROMPTS[:3]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert seen == [(10, 12)] + [(3, 4)] * 5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("guesser", "most"),
    [
        ("replay", 14),
        ("greedy draft", 64),
        pytest.param("replay", 64, marks=pytest.mark.slow),
        pytest.param("draft", 14, marks=pytest.mark.slow),
    ],
)
def test_verification_is_replayed(
    device: str, guesser: str, most: int, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guesses of any quality and all kinds of sampling: the tokens of the plain loop, from recordings of both models
    as long as a step has few enough tokens."""
    monkeypatch.setattr(sizes, "MAX_REPLAYED", most)
    path = lively_qwen3(checkpoints)
    prompts = [[*p[:20], i] for i, p in enumerate((PROMPTS * 2)[:5])]
    params = mixed_params(len(prompts))
    if guesser == "greedy draft":
        params = [
            SamplingParams(temperature=0, max_tokens=TOKENS, repetition_penalty=1.5, logprobs=i) for i in range(5)
        ]
    speculative = {"method": "ngram", "k": 4} if guesser == "replay" else {"model": path, "k": 3}
    config: dict[str, Any] = {"max_num_seqs": 4, "speculative": speculative}
    recorded = make_llm(path, device, monkeypatch, **config)
    # Nothing is recorded, and the draft is as good as can be, so that it is right about drawn tokens, too.
    plain = LLM(path, device=device, dtype="float32", enforce_eager=True, **DEFAULTS | config)
    assert runner_of(plain).recorded is None
    if guesser == "replay":
        unguided = make_llm(path, device, monkeypatch, max_num_seqs=4)
        known = {str(i): ids for i, ids in enumerate(tokens_of(unguided, prompts, params))}
        for llm in (recorded, plain):
            llm.engine.scheduler.proposer = ReplayProposer(known, 0.8, VOCAB)
    expected = tokens_of(plain, prompts, params)
    if guesser == "replay":
        assert expected == list(known.values())

    seen: list[tuple[Any, int, int]] = []
    run = DecodeSteps.run

    def counting(self: DecodeSteps, tokens: Any) -> Any:
        seen.append((self, tokens.shape[1], len(set(tokens[1]))))
        return run(self, tokens)

    monkeypatch.setattr(DecodeSteps, "run", counting)
    assert tokens_of(recorded, prompts, params) == expected
    assert recorded.engine.scheduler.speculation == plain.engine.scheduler.speculation
    steps = runner_of(recorded).recorded
    assert steps is not None
    verified = [n for decodes, n, num_rows in seen if decodes is steps.decodes and n > num_rows]
    assert 4 < max(verified) <= most
    drafted = [n for decodes, n, num_rows in seen if decodes is not steps.decodes]
    assert bool(drafted) == (guesser != "replay") and max(drafted, default=0) <= 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("budget", [16, 2])
def test_prompts_stay_what_they_are(
    device: str, budget: int, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording samples after every token that it computes. It does so in the token's row only where a token was
    asked for, also if a single token of a prompt is computed beside a decode (with the smaller budget)."""
    llm = make_llm(lively_qwen3(checkpoints), device, monkeypatch, max_num_batched_tokens=budget, max_num_seqs=2)
    rows, replay, steps = runner_of(llm).rows, DecodeSteps.replay, []

    def watching(self: DecodeSteps, scheduled: Any) -> Any:
        before = rows.token_ids.clone()
        replayed = replay(self, scheduled)
        assert replayed is not None
        changed = [tuple(place) for place in (rows.token_ids != before)[:-1].nonzero().tolist()]
        may = {(s.row, s.start + s.num_tokens) for s in scheduled if s.sample}
        assert set(changed) <= may
        rows_of = [s.row for s in scheduled if s.sample]
        asked = replayed.asked()
        assert asked.rows.tolist() == rows_of and len(asked.logits) == len(rows_of)
        steps.append([s.num_tokens for s in scheduled])
        return replayed

    monkeypatch.setattr(DecodeSteps, "replay", watching)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=3, ignore_eos=True)
    tokens_of(llm, [[*range(20, 59)], [*range(9)]], params)
    # The first prompt in chunks, the second beside the last of them.
    expected = {16: [[16], [16], [7, 9]], 2: [[2]] * 19 + [[1, 1]] * 2}[budget]
    assert steps[: len(expected)] == expected


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_that_would_read_too_much_are_launched(
    device: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "MAX_READ", 125 * 2 * 2 * 32 * 4)  # 125 keys and values of 2 heads, or 500
    llm = make_llm(lively_qwen3(checkpoints), device, monkeypatch, max_num_batched_tokens=16)
    recorded = runner_of(llm).recorded
    assert recorded is not None and recorded.decodes.max_keys == 125
    replay, steps = RecordedSteps.replay, []

    def counting(self: RecordedSteps, scheduled: Any) -> Any:
        replayed = replay(self, scheduled)
        steps.append((scheduled[0].start, replayed is not None))
        return replayed

    monkeypatch.setattr(RecordedSteps, "replay", counting)
    tokens_of(llm, [[*range(50)]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert steps == [(0, True), (16, False), (32, False), (48, True), (50, True), (51, True)]


@pytest.mark.parametrize(("guesses", "fits"), [((), False), ((5, 6, 7), True)], ids=["a chunk", "guesses"])
def test_keys_of_chunks_count_twice(guesses: tuple[int, ...], fits: bool) -> None:
    work = [Scheduled(0, 0, 146, 4, True, (), guesses), Scheduled(1, 1, 9000, 1, True, ())]
    steps: Any = SimpleNamespace(sizes=[256], max_several=256, max_keys=1000)
    assert DecodeSteps._fits(steps, work, work[:1]) is fits


@pytest.mark.parametrize("seats", [32, 300])
def test_guesses_for_which_no_recording_with_prompts_has_room(seats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 sequences with 7 guesses each have 256 samples. With 32 seats there is no recording with prompts for these,
    and to launch them kernel by kernel would take longer than reading their keys."""
    guessing = {"speculative": {"method": "ngram", "k": 7}}
    llm = make_llm(EMBEDDED_MODEL, "cpu", monkeypatch, max_num_seqs=seats, max_model_len=512, **guessing)
    recorded = runner_of(llm).recorded
    assert recorded is not None
    monkeypatch.setattr(recorded.decodes, "max_keys", 2**28 // 4096)  # of Qwen3-0.6B, or of Qwen3-8B
    nothing = torch.zeros(256, 1)
    sampled = Sampled(nothing, nothing, nothing, nothing, None)
    monkeypatch.setattr(recorded.decodes, "run", lambda tokens: sampled)
    monkeypatch.setattr(recorded.prompts, "_load", lambda *_: None)
    monkeypatch.setattr(recorded.prompts, "_replays", dict.fromkeys(recorded.prompts._replays, lambda: sampled))
    found = []
    for context in 200, 500, 1000, 2000:
        work = [Scheduled(row, row, context - 8, 8, True, (), (1,) * 7) for row in range(32)]
        replayed = recorded.replay(work)
        found.append("launched" if replayed is None else "decodes" if replayed is sampled else "prompts")
    larger = ["decodes", "decodes", "launched"] if seats == 32 else ["prompts"] * 3
    assert found == ["decodes", *larger]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("most", [0, 256], ids=["chunks", "decodes"])
def test_padding_touches_no_block(device: str, most: int, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3 sequences in a recording of 4, after 6 in theirs; and their prompts, 27 tokens in a recording of 64 for chunks
    or of 48 for decodes: of the pool, only their own next slots change."""
    monkeypatch.setattr(sizes, "MAX_REPLAYED", most)
    llm = make_llm(lively_qwen3(checkpoints), device, monkeypatch, enable_prefix_caching=False)
    runner = runner_of(llm)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    tokens_of(llm, [p[:18] for p in (PROMPTS * 4)[:6]], params)
    for cache in runner.target.kv_cache:
        cache[:, :-1].fill_(float("nan"))  # the scratch block is nobody's, but must stay finite
    tokens_of(llm, [list(range(i, i + 9)) for i in range(3)], params)
    written = runner.target.kv_cache[0][0, :-1].isfinite().flatten(2).all(-1).flatten()  # [num_blocks * block_size]
    assert int(written.sum()) == 3 * (9 + 3)
    assert all(bool(cache[:, -1].isfinite().all()) for cache in runner.target.kv_cache)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_recorded_and_plain_agree_in_half_precision(dtype: str, checkpoints: Path) -> None:
    """Chosen tokens' log-probabilities, teacher-forced by the recorded run's own tokens as prompts of the plain one."""
    path = lively_qwen3(checkpoints)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1)
    prompts = [[*p[:20], i] for i, p in enumerate((PROMPTS * 2)[:7])]

    def logprobs(llm: LLM, of: list[list[int]]) -> list[float]:
        outputs = llm.generate([{"prompt_token_ids": p} for p in of], params, use_tqdm=False)
        return [next(iter(o.outputs[0].logprobs[0].values())).logprob for o in outputs]

    config: dict[str, Any] = {"device": "cuda", "dtype": dtype, "skip_tokenizer_init": True, "num_kv_blocks": 60}
    recorded, plain = LLM(path, **config), LLM(path, enforce_eager=True, **config)
    a, b = torch.tensor(logprobs(recorded, prompts)), torch.tensor(logprobs(plain, prompts))
    assert (a - b).abs().max() < 0.1


@pytest.mark.parametrize("max_model_len", [2, 20, 200])
def test_warming_up_touches_no_block_and_no_row(checkpoints: Path, max_model_len: int) -> None:
    with LLM(
        lively_qwen3(checkpoints), device="cpu", skip_tokenizer_init=True, kvcache_block_size=4, num_kv_blocks=50,
        max_model_len=max_model_len,
    ) as llm:  # fmt: skip
        runner: ModelRunner = llm.engine.executor.runner
        for kv in runner.target.kv_cache:
            kv[:, :-1].normal_()
        before = [kv[:, :-1].clone() for kv in runner.target.kv_cache]
        rows = runner.rows.token_ids[:-1].clone()
        runner.warm_up(2048)
        assert all(torch.equal(kv[:, :-1], old) for kv, old in zip(runner.target.kv_cache, before, strict=True))
        assert torch.equal(runner.rows.token_ids[:-1], rows)
        assert any(kv[:, -1].any() for kv in runner.target.kv_cache), "the scratch block was written"


def test_closing_frees_a_recorded_draft_without_a_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded step keeps what it was recorded from, which must not be what keeps the recorded step."""
    draft = EMBEDDED_MODEL.parent / "story_draft"
    config = {"num_kv_blocks": 8, "speculative": {"model": draft, "k": 2}, "skip_tokenizer_init": True}
    llm = make_llm(EMBEDDED_MODEL, "cpu", monkeypatch, **config)
    runner: Any = runner_of(llm)
    memory = [weakref.ref(t) for t in (*runner.guesses.model.kv_cache, *runner.target.kv_cache, runner.rows.token_ids)]
    del runner
    gc.disable()
    try:
        llm.close()
        assert not any(tensor() is not None for tensor in memory)
    finally:
        gc.enable()
