"""Stage 6: buckets, padding, static memory, and that the recorded step can be recorded at all.

Without a GPU the stage's own stand-in only calls the step again. Here a tape (`tools/pictures/decode_profile.py`) takes
its place where it matters: like a CUDA graph it freezes everything but the contents of tensors, and forbids to ask for
these.
"""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.stages.runners import CompiledEngine
from stages.core import SamplingParams, make_sequences, sample
from tests import oracle
from tests.stages.requests import PROMPTS, TIGHT, greedy, random_prompts
from tests.stages.shadow import ShadowModel, continuation
from tests.stages.subject import Subject, since
from tests.weights import lively_qwen3
from tools.pictures.decode_profile import TapeGraph

ROOMY: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}


class Counting:
    """A graph that counts its replays."""

    def __init__(self, graph: Any, bucket: int, replays: Counter[int]) -> None:
        self.graph, self.bucket, self.replays = graph, bucket, replays

    def replay(self) -> Any:
        self.replays[self.bucket] += 1
        return self.graph.replay()


def count_replays(engine: Any) -> Counter[int]:
    """Replays from now on, by bucket."""
    replays: Counter[int] = Counter()
    engine.graphs = {bucket: Counting(graph, bucket, replays) for bucket, graph in engine.graphs.items()}
    return replays


def tape(engine: Any) -> None:
    """Record every bucket for real."""
    engine.graphs = {bucket: TapeGraph(partial(engine.decode_step, bucket)) for bucket in engine.buckets}


def eager(engine: Any) -> Any:
    """The same engine, without ever a replay."""
    engine.bucket_for = lambda plan: None
    return engine


# --- buckets ---


@since(6, 6)
@pytest.mark.parametrize("largest", [*range(1, 41), 64, 100, 256])
def test_every_batch_size_has_a_bucket(subject: Subject, largest: int) -> None:
    ladder = subject.part("bucket_ladder")(largest)
    assert ladder == sorted(set(ladder)) and ladder[0] == 1 and ladder[-1] == largest
    assert set(ladder[:-1]) <= {1, 2, 4, *range(8, 256, 8)}
    for size in range(1, largest + 1):
        bucket = min(b for b in ladder if b >= size)
        assert bucket - size < min(size, 8), f"{bucket - size} rows of padding for {size} sequences"


@since(6, 6)
def test_every_batch_up_to_forty_is_right_in_its_bucket(subject: Subject, shadow: Path) -> None:
    """The shadow model sees every slot that any row reads, padding included."""
    engine = subject.engine(shadow, block_size=2, num_blocks=160, max_num_seqs=40, max_num_batched_tokens=256)
    ShadowModel.on(engine)
    for size in range(1, 41):
        replays = count_replays(engine)
        prompts = [[(size + i) % 50, i, i % 7] for i in range(size)]
        outputs = engine.generate(prompts, greedy(3, ignore_eos=True))
        assert outputs == [continuation(prompt, 3, True) for prompt in prompts]
        expected = next(b for b in (1, 2, 4, 8, 16, 24, 32, 40) if b >= size)
        assert replays == {expected: 2}, "a prefill, then two decode steps"
        subject.check_idle(engine)


@since(6, 6)
def test_only_pure_decode_steps_are_replayed(subject: Subject, shadow: Path) -> None:
    """A chunk in the step, or a sequence that does not reach its end, and it runs eagerly."""
    engine = subject.engine(shadow, block_size=2, num_blocks=64, max_num_seqs=4, max_num_batched_tokens=4)
    ShadowModel.on(engine)
    replays = count_replays(engine)
    prompts = [[1], [i % 60 for i in range(11)]]
    outputs = engine.generate(prompts, [greedy(9, True), greedy(3, True)])
    assert outputs == [continuation(prompts[0], 9, True), continuation(prompts[1], 3, True)]
    # Steps 1 to 4 carry chunks of 3, 3, 3 and 2; then two pairs, then the first alone
    assert replays == {2: 2, 1: 3}
    one_token_chunks = subject.engine(shadow, block_size=2, num_blocks=64, max_num_batched_tokens=1)
    ShadowModel.on(one_token_chunks)
    replays = count_replays(one_token_chunks)
    assert one_token_chunks.generate([[1, 2, 3]], greedy(2, True)) == [continuation([1, 2, 3], 2, True)]
    assert replays == {1: 2}, "the last token of the prompt, and the first of the output"


@since(6, 6)
def test_a_model_that_was_exchanged_is_obeyed(subject: Subject, checkpoints: Path) -> None:
    """On a GPU a graph holds the kernels of the model that it recorded, so that another one must run eagerly."""
    engine = subject.engine(lively_qwen3(checkpoints), **TIGHT)
    assert engine.bucket_for([]) is None, "nothing to do is no decode step"
    scheduled = subject.part("Scheduled")
    seq = make_sequences([[5]], greedy(2), vocab_size=512, max_model_len=64)[0]
    assert engine.bucket_for([scheduled(seq, 1)]) == 1
    engine.device = torch.device("cuda")
    assert engine.bucket_for([scheduled(seq, 1)]) == 1
    engine.model = object()
    assert engine.bucket_for([scheduled(seq, 1)]) is None


# --- padding and static memory ---


@since(6, 6)
def test_padding_writes_to_the_scratch_block_only(subject: Subject, checkpoints: Path) -> None:
    """Three sequences in a bucket of four; every block that nobody was given is as it was, the pool's last one too."""
    taken: set[int] = set()
    engine = subject.engine(
        lively_qwen3(checkpoints), **ROOMY, on_event=lambda e: taken.update(e.get("taken", ())) if e else None
    )
    assert engine.cache.k.shape[1] == ROOMY["num_blocks"] + 1
    for cache in (engine.cache.k, engine.cache.v):
        cache.fill_(7.0)
    replays = count_replays(engine)
    engine.generate(PROMPTS[1:4], greedy(6, ignore_eos=True))
    assert replays == {4: 5}
    untouched = sorted(set(range(ROOMY["num_blocks"])) - taken)
    assert ROOMY["num_blocks"] - 1 in untouched and len(taken) == 10
    for cache in (engine.cache.k, engine.cache.v):
        assert (cache[:, untouched] == 7.0).all()
        assert (cache[:, engine.scratch_block, 0] != 7.0).any(), "where else did the padding row write?"
        assert (cache[:, engine.scratch_block, 1:] == 7.0).all()


@since(6, 6)
@pytest.mark.parametrize("recorded", [False, True], ids=["stand-in", "tape"])
def test_graphs_g2_batch_3_after_batch_8_and_short_tables_after_long_ones(
    subject: Subject, checkpoints: Path, recorded: bool
) -> None:
    """What a larger batch and longer tables left in the static memory changes nothing: eager steps say the same."""
    path = lively_qwen3(checkpoints)
    engine, reference = subject.engine(path, **ROOMY), eager(subject.engine(path, **ROOMY))
    if recorded:
        tape(engine)
    calls = [random_prompts(*[30] * 8), random_prompts(2, 3, 1, seed=1), random_prompts(40, 1, seed=2), [[7]]]
    sampled = SamplingParams(1.2, 9, ignore_eos=True, seed=3)
    for prompts in calls:
        mixed = [sampled if i % 3 == 1 else greedy(9, ignore_eos=True) for i in range(len(prompts))]
        assert engine.generate(prompts, mixed) == reference.generate(prompts, mixed)
        outputs = engine.generate(prompts, greedy(5))
        oracle.check_greedy(path, prompts, outputs, greedy(5))
        subject.check_idle(engine)


@since(6, 6)
def test_the_step_can_be_recorded_and_follows_its_inputs(subject: Subject, checkpoints: Path) -> None:
    """Recorded before any request came; preemption, sharing and joining only change what lies in the input memory."""
    path = lively_qwen3(checkpoints)
    options = TIGHT | {"num_blocks": 10, "max_num_seqs": 6}
    engine = subject.engine(path, **options)
    tape(engine)
    replays = count_replays(engine)
    addresses = [engine.device_memory.data_ptr(), engine.noise.data_ptr()]
    params = [SamplingParams(t, 12, seed=i) for i, t in enumerate((0.7, 1.0, 0.0, 1.5, 1.0, 0.3))]
    assert engine.generate(PROMPTS, params) == eager(subject.engine(path, **options)).generate(PROMPTS, params)
    assert sum(replays.values()) > 10 and len(replays) > 1
    assert addresses == [engine.device_memory.data_ptr(), engine.noise.data_ptr()]


@since(6, 6)
def test_one_copy_in_and_one_copy_out(subject: Subject, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the replay, a greedy step moves its inputs in one piece, and its tokens in another."""
    engine = subject.engine(lively_qwen3(checkpoints), **ROOMY)
    copies: list[int] = []
    device = engine.device_memory

    def memory_of(memory: torch.Tensor, bucket: int) -> Any:
        if memory is device:
            copies.append(bucket)
        return memory[: bucket * (5 + engine.table_width)]

    tape(engine)
    monkeypatch.setattr(engine, "memory_of", memory_of)
    assert engine.table_width == 64, "a table can be no longer than the pool, whatever the model could take"
    monkeypatch.setattr(subject.home("CUDAGraphEngine"), "gumbel", None)  # greedy rows need no noise
    engine.generate(PROMPTS[1:4], greedy(6, ignore_eos=True))
    assert copies == [4] * 5


# --- sampling ---


@since(6, 6)
def test_device_sampling_is_the_rule_of_all_stages(subject: Subject, checkpoints: Path) -> None:
    """Rows with temperatures from 0 to 5 in one bucket: the tokens of `stages.core.sample` from the same logits."""
    engine = subject.engine(lively_qwen3(checkpoints), **ROOMY)
    logits: list[torch.Tensor] = []
    engine.model = Keeping(engine.model, logits)
    params = [SamplingParams(t, 30, True, seed) for seed, t in enumerate((0.0, 1e-5, 0.3, 1.0, 5.0))]
    expected = make_sequences(PROMPTS[:5], params, vocab_size=512, max_model_len=99)
    outputs = engine.generate(PROMPTS[:5], params)
    prefill, *decodes = logits
    for rows in (prefill, *(step[:5] for step in decodes)):
        for seq, token in zip(expected, sample(rows, expected), strict=True):
            seq.token_ids.append(token)
    assert outputs == [seq.output for seq in expected]


class Keeping:
    """A model that keeps the logits it gave."""

    def __init__(self, model: Any, logits: list[torch.Tensor]) -> None:
        self.model, self.kept = model, logits

    def __call__(self, *arguments: Any) -> Any:
        return self.model(*arguments)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.kept.append(self.model.logits(hidden))
        return self.kept[-1]


# --- compiled ---


@pytest.mark.slow
@pytest.mark.timeout(600)
@since(6, 6)
def test_compiled_layers_give_the_same_tokens(subject: Subject, checkpoints: Path) -> None:
    path = lively_qwen3(checkpoints)
    engine = CompiledEngine(str(path), **ROOMY)
    weights = [p.data_ptr() for p in engine.model.parameters()]
    assert [p.data_ptr() for p in engine.compiled.model.parameters()] == weights, "one copy of the weights"
    for prompts in (PROMPTS, PROMPTS[:3], PROMPTS[4:5]):
        oracle.check_greedy(path, prompts, engine.generate(prompts, greedy(12)), greedy(12))
