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
from stages.core import SamplingParams, Sequence, make_sequences, sample
from tests import oracle
from tests.stages.likely import check, exercise
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


# --- the exercises ---


@exercise("6.1")
@pytest.mark.parametrize("largest", [1, 2, 3, 4, 8, 9, 16, 20, 40])
def test_the_ladder_is_small_sizes_multiples_of_eight_and_the_largest(subject: Subject, largest: int) -> None:
    sizes = [1, 2, 4, *range(8, 256, 8)]
    right = sorted({size for size in sizes if size < largest} | {largest})
    likely = {
        "the largest batch has no bucket": [size for size in sizes if size < largest],
        "the largest size is there twice: only smaller sizes come before max_num_seqs": sorted([*right, largest]),
        "with powers of two, up to half of a batch is padding: from 8 on, take multiples of 8": sorted(
            {2**i for i in range(9) if 2**i < largest} | {largest}
        ),
        "sizes above max_num_seqs are there, too": [1, 2, 4, *range(8, largest, 8), largest],
    }
    check(f"bucket_ladder({largest})", subject.part("bucket_ladder")(largest), right, likely)


@exercise("6.2")
def test_rows_describe_the_newest_tokens_and_harmless_padding(subject: Subject) -> None:
    """Texts of 5 and 3 tokens in blocks of 2, in a bucket of 4; the scratch block is number 9."""
    rows_class = subject.part("Rows")
    memory = torch.full((4 * (5 + 3),), 99, dtype=torch.int64)  # what an earlier batch left there
    rows = rows_class.of(memory, 4)
    batch = [
        Sequence(0, [10, 11, 12, 13, 14], 2, SamplingParams(0.5), 0, block_table=[6, 2, 4], num_computed=4),
        Sequence(1, [20, 21, 22], 2, SamplingParams(1.5), 0, block_table=[7, 3], num_computed=2),
    ]
    rows.fill(batch, 2, 9)
    rows = rows_class.of(memory, 4)
    right: dict[str, list[Any]] = {
        "input_ids": [14, 22, 0, 0],
        "positions": [4, 2, 0, 0],
        "slots": [8, 6, 18, 18],
        "context_lens": [5, 3, 1, 1],
        "temperatures": [0.5, 1.5, 0.0, 0.0],
    }
    tables: dict[str, dict[str, Any]] = {
        "input_ids": {"the last prompt token, not the newest": [11, 21, 0, 0]},
        "positions": {"one too far: positions count from 0": [5, 3, 0, 0]},
        "slots": {
            "padding writes to slot 0, which may belong to a sequence: use the scratch block": [8, 6, 0, 0],
            "a block number is not a slot: the first slot of a block is block * block_size": [8, 6, 9, 9],
            "blocks of the newest tokens; slots_of gives their slots": [4, 3, 18, 18],
            "one too far: the newest of n tokens stands at n - 1": [9, 7, 18, 18],
        },
        "context_lens": {
            "the newest token sees itself: one more than its position": [4, 2, 1, 1],
            "padding sees nothing, and a softmax over nothing is NaN: 1, not 0": [5, 3, 0, 0],
        },
        "temperatures": {"padding is greedy: temperature 0": [0.5, 1.5, 1.0, 1.0]},
    }
    for name, values in right.items():
        got = getattr(rows, name).tolist()
        kept = [99] * 4 if name != "temperatures" else torch.full((4,), 99).view(torch.float64).tolist()
        likely = tables[name] | {
            "nothing was written into the memory: use self.x.copy_(...), since self.x = ... makes another tensor": kept,
            "the padding rows were not written: they still have the values of an earlier batch": values[:2] + kept[:2],
        }
        check(name, got, values, likely)


@exercise("6.3")
def test_the_recorded_step_samples_by_the_rule_of_all_stages(subject: Subject, checkpoints: Path) -> None:
    """Two rows in an engine for four: logits + temperature * noise, and each row's largest."""
    engine = subject.engine(lively_qwen3(checkpoints), **ROOMY)
    rows = subject.part("Rows").of(engine.memory_of(engine.device_memory, 2), 2)
    rows.temperatures.copy_(torch.tensor([0.0, 2.0]))
    engine.attention_of = lambda rows, numbers: None
    logits = torch.tensor([[1.0, 3.0, 0.0, 2.0], [1.0, 3.0, 0.0, 2.0]])
    engine.noise = torch.tensor([[9.0, 0, 0, 0], [0, 0, 2.0, 0], [0, 0, 0, 99.0], [0, 0, 0, 99.0]]).double()

    class Model:
        def __call__(self, *_: Any) -> torch.Tensor:
            return torch.zeros(2, 1)

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return logits

    engine.model = Model()
    likely = {
        "the noise is added as it is, whatever the temperature": torch.tensor([0, 1]),
        "the temperature is left out, and so is the noise": torch.tensor([1, 1]),
        "keepdim leaves a dimension of one; wanted is [b]": torch.tensor([[1], [2]]),
        "one index for all rows together: argmax(dim=-1)": torch.tensor(6),
        "the largest row of each column; wanted is the largest of each row: argmax(dim=-1)": torch.tensor([0, 0, 1, 0]),
        "divided by the temperature, which is 0 for greedy rows": (
            logits / rows.temperatures[:, None] + engine.noise[:2]
        ).argmax(-1),
    }
    check("tokens of two rows", engine.decode_step(2), torch.tensor([1, 2]), likely)


@exercise("6.4")
def test_the_gather_of_whole_tables_sees_only_what_there_is(subject: Subject, checkpoints: Path) -> None:
    """Tables of 3 blocks of 2 tokens; contexts of 3 tokens and of 1."""
    engine = subject.engine(lively_qwen3(checkpoints), block_size=2, num_blocks=8, max_num_seqs=2)
    rows = subject.part("Rows").of(torch.zeros(2 * (5 + 3), dtype=torch.int64), 2)
    rows.block_tables.copy_(torch.tensor([[4, 1, 8], [2, 8, 8]]))
    rows.context_lens.copy_(torch.tensor([3, 1]))
    got = engine.whole_tables(rows, torch.arange(2))
    check("tokens", got.tokens, torch.tensor([[0], [1]]), {"the shape must be [b, 1], a column": torch.arange(2)})
    seen = torch.tensor([[True] * 3 + [False] * 3, [True] + [False] * 5])
    likely = {
        "a row sees one slot too many: column c is seen if c < context_lens": torch.tensor(
            [[True] * 4 + [False] * 2, [True] * 2 + [False] * 4]
        )[:, None, None],
        "[b, C]: dimensions for heads and queries are missing, [b, 1, 1, C]": seen,
        "[b, 1, C]: one for each of the dimensions for heads and queries, [b, 1, 1, C]": seen[:, None],
    }
    if got.mask.shape[-1] != 6:
        raise AssertionError(
            f"the mask has {got.mask.shape[-1]} columns, and C = M * block_size is 6\nlikely: a width that depends on "
            f"the lengths; a recording has one shape for all of them"
        )
    check("mask", got.mask, seen[:, None, None], likely)
    right = torch.tensor([[8, 9, 2, 8, 8, 8], [4, 4, 4, 4, 4, 4]])
    likely = {
        "slots that are not seen are read all the same, and 0 * NaN is NaN: torch.where": torch.tensor(
            [[8, 9, 2, 3, 16, 17], [4, 5, 16, 17, 16, 17]]
        ),
        "the first slot of each block, without offsets": torch.tensor([[8, 8, 2, 8, 8, 8], [4, 4, 4, 4, 4, 4]]),
        "first all first slots, then all second slots: the slots of a block lie next to each other": torch.tensor(
            [[8, 2, 16, 8, 8, 8], [4, 4, 4, 4, 4, 4]]
        ),
        "slot 0 takes the place of what is not seen, and may hold another sequence's NaN": right * seen,
    }
    check("context_slots", got.context_slots, right, likely)


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
