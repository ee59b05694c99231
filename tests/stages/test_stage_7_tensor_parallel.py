"""Stage 7: what each rank has, and that the ranks together are the model.

The same tests run with gloo on the CPU (2 ranks; in the slow tier also 4, more than the models have key/value heads)
and with NCCL on as many GPUs. A rank takes seconds to start, so engines are shared where that is possible.
"""

import pickle
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stages.checkpoint import read_config, read_tensors
from stages.core import SamplingParams, Sequence
from stages.stage_1_naive import attend_to_all
from stages.stage_5_continuous_batching import ContinuousBatchingEngine
from tests import oracle
from tests.stages.events import Listener
from tests.stages.likely import check, exercise
from tests.stages.ranks import TINY, Threads, cpu_seconds, on_linux, pids_of
from tests.stages.requests import PROMPTS, greedy, random_prompts, story_prompts
from tests.stages.subject import Subject, since
from tests.weights import lively_qwen3, random_qwen2

# --- the exercises ---


@exercise("7.1")
def test_a_rank_has_its_share_of_heads_neurons_and_tokens(subject: Subject, story_model: Path) -> None:
    """4 heads over 2 key/value heads and an odd vocabulary of 511, for 1, 2 and 4 ranks."""
    whole = replace(read_config(story_model), vocab_size=511)
    for size, kv_heads, tokens in ((1, 2, 511), (2, 1, 256), (4, 1, 128)):
        got = subject.part("share_of")(whole, size)
        neurons = whole.intermediate_size // size
        right: dict[str, Any] = {"num_attention_heads": 4 // size, "num_key_value_heads": kv_heads}
        right |= {"intermediate_size": neurons, "vocab_size": tokens}
        likely = {
            "num_key_value_heads": {"with more ranks than heads, each rank has one head": 2 // size, "not cut": 2},
            "vocab_size": {
                "rounded down, so that no rank has the last tokens: round up": 511 // size,
                "one too many where nothing is left over": 511 // size + 1,
                "not cut": 511,
            },
            "num_attention_heads": {"not cut: each rank has a part of the heads": 4},
            "intermediate_size": {"not cut: each rank has a part of the neurons": whole.intermediate_size},
        }
        for name, value in right.items():
            check(f"{name} of one of {size} ranks", getattr(got, name), value, likely[name])
        assert got == replace(whole, **right), (
            "another number was changed\nlikely: head_dim, hidden_size and the other numbers must stay as they are"
        )


@exercise("7.2")
def test_each_tensor_is_cut_along_the_right_dimension(subject: Subject, story_model: Path) -> None:
    """Tensors whose rows and columns are numbered, for two ranks of a model with two key/value heads."""
    config = replace(read_config(story_model), vocab_size=7)
    cut, two = subject.part("cut"), config.num_key_value_heads
    assert two == 2
    numbers = torch.arange(64.0).view(8, 8)
    top, bottom, left, right = numbers[:4], numbers[4:], numbers[:, :4], numbers[:, 4:]
    by_rows = {"this is its second half": bottom, "cut by its columns: it loses outputs, which are rows": left}
    by_columns = {"this is its second half": right, "cut by its rows: it loses inputs, which are columns": top}
    rows_of = {"q_proj": by_rows, "gate_proj": by_rows, "up_proj": by_rows, "k_proj": by_rows, "v_proj": by_rows}
    whole = {"not cut": numbers}
    for layer in ("q_proj", "gate_proj", "up_proj", "k_proj", "v_proj", "o_proj", "down_proj"):
        halves, likely = ((top, bottom), rows_of[layer]) if layer in rows_of else ((left, right), by_columns)
        name = f"layers.0.self_attn.{layer}.weight"
        check(f"{layer}.weight of rank 0", cut(name, numbers, config, 0, 2), halves[0], likely | whole)
        check(f"{layer}.weight of rank 1", cut(name, numbers, config, 1, 2), halves[1], whole)
    bias = torch.arange(8.0)
    likely_bias = {"cut; a bias behind the sum is whole on every rank": bias[:4]}
    check("o_proj.bias", cut("layers.0.self_attn.o_proj.bias", bias, config, 0, 2), bias, likely_bias)
    check("q_proj.bias", cut("layers.0.self_attn.q_proj.bias", bias, config, 1, 2), bias[4:], {"not cut": bias})
    norm = "layers.0.input_layernorm.weight"
    check("input_layernorm.weight", cut(norm, bias, config, 1, 2), bias, {"norms are whole on every rank": bias[4:]})
    heads = [cut("layers.0.self_attn.k_proj.weight", numbers, config, rank, 4)[0, 0].item() for rank in range(4)]
    likely_heads = {
        "the heads are assigned in turn: ranks 0 and 1 should share the first head": [0.0, 32.0, 0.0, 32.0],
        "each rank has half a head: a head is never cut, so two ranks have the same one": [0.0, 16.0, 32.0, 48.0],
    }
    check("k_proj.weight's first number on 4 ranks", heads, [0.0, 0.0, 32.0, 32.0], likely_heads)
    tokens = numbers[:7]
    last = cut("embed_tokens.weight", tokens, config, 1, 2)
    likely_rows = {
        "the row of zeros at the end is missing: all ranks have the same number of rows": numbers[4:7],
        "zeros beside the rows, not below the last: F.pad counts from the last dimension": F.pad(numbers[4:7], (0, 1)),
        "not cut": tokens,
    }
    check("embed_tokens.weight of rank 1, of 7 tokens", last, torch.cat((numbers[4:7], torch.zeros(1, 8))), likely_rows)
    check("lm_head.weight of rank 0", cut("lm_head.weight", tokens, config, 0, 2), top, {"not cut": tokens})


@exercise("7.3")
def test_the_ranks_look_up_their_own_tokens_and_add_up(subject: Subject) -> None:
    """Six tokens on two ranks: token t has the vector [t + 1]."""
    whole = torch.arange(1.0, 7)[:, None]  # [V, 1]
    ids = torch.tensor([0, 2, 3, 5])

    class Alone:
        """A rank that adds nothing to what it gives, and notes that it was asked to."""

        def __init__(self, rank: int) -> None:
            self.rank, self.asked = rank, 0

        def all_reduce(self, x: Tensor) -> Tensor:
            self.asked += 1
            return x

    for rank, right in ((0, [[1.0], [3], [0], [0]]), (1, [[0.0], [0], [4], [6]])):
        group = Alone(rank)
        layer = subject.part("VocabParallelEmbedding")(torch.nn.Embedding(3, 1), group)
        layer.weight.data = whole[3 * rank : 3 * rank + 3]
        rows, vectors = ids - 3 * rank, layer.weight.data
        own = (rows >= 0) & (rows < 3)
        found = vectors[rows.where(own, 0)]
        likely = {
            "vectors of other ranks' tokens are not zero: the sum would have them twice": vectors[rows.clamp(0, 2)],
            "vectors of other ranks' tokens are not zero, but those of row 0": found,
            "what holds for a token holds for its vector: a column own[:, None]": found * own,
            "the last of a rank's own tokens counts as another rank's": found * (own & (rows < 2))[:, None],
        }
        with torch.inference_mode():
            got = layer(ids)
        check(f"what rank {rank} gives for tokens {ids.tolist()}", got, torch.tensor(right), likely)
        likely_sum = {"the other ranks' vectors are missing: self.group.all_reduce": 0}
        check("sums over the ranks", group.asked, 1, likely_sum)


@exercise("7.4")
def test_a_rank_names_its_best_token_and_never_padding(subject: Subject) -> None:
    """The second of two ranks of 4 columns has tokens 4, 5, 6 of 7, and a column of padding."""
    best_of = subject.part("best_of")
    logits = torch.tensor([[-3.0, -1.0, -2.0, 0.0], [-1.0, -1.0, -5.0, 0.0]])
    likely = {
        "padding wins with its logit 0: mask the ids from vocab_size on": [[0.0, 7.0], [0.0, 7.0]],
        "the ids count from this rank's first token: add the tokens of the ranks before": [[-1.0, 1.0], [-1.0, 0.0]],
        "of equal logits the last wins: the lowest id must win, which argmax finds": [[-1.0, 5.0], [-1.0, 5.0]],
        "the ids of a rank begin where those of the rank before end; padding is told by them": [[0.0, 3.0]] * 2,
        "a pair for each row, [N, 2]: dim=-1": [[-1.0, -1.0], [5.0, 4.0]],
        "the pairs are (logit, id), in that order": [[5.0, -1.0], [4.0, -1.0]],
    }
    got = best_of(logits, 1, 7)
    likely_tensors = {mistake: torch.tensor(pairs).double() for mistake, pairs in likely.items()}
    check("pairs (logit, id)", got.double(), torch.tensor([[-1.0, 5], [-1.0, 4]]).double(), likely_tensors)
    assert got.dtype == torch.float64, f"pairs of {got.dtype}\nlikely: float32 and bf16 round large ids: use float64"


# --- the parts, without processes ---


@since(7)
def test_what_one_rank_has(subject: Subject, story_model: Path, awkward_model: Path) -> None:
    """Its heads, at least one key/value head, its neurons and its tokens, rounded up; nothing else is cut."""
    share_of = subject.part("share_of")
    for path, size, kv_heads in (
        (story_model, 1, 2), (story_model, 2, 1), (story_model, 4, 1),
        (awkward_model, 1, 1), (awkward_model, 2, 1), (awkward_model, 4, 1),
    ):  # fmt: skip
        config = read_config(path)
        assert share_of(config, size) == replace(
            config,
            num_attention_heads=4 // size,
            num_key_value_heads=kv_heads,
            intermediate_size=config.intermediate_size // size,
            vocab_size=-(-config.vocab_size // size),
        )


@since(7)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_parts_of_every_tensor_are_the_tensor(subject: Subject, awkward_model: Path, size: int) -> None:
    """Laid side by side; but for copies where ranks share a key/value head, and for zeros under the last token."""
    config, cut = read_config(awkward_model), subject.part("cut")
    seen = set()
    for name, whole in read_tensors(awkward_model):
        parts = [cut(name, whole, config, rank, size) for rank in range(size)]
        kind = name.split(".")[-2]
        seen.add(kind)
        if kind in ("k_proj", "v_proj") or "norm" in kind or name.endswith(("o_proj.bias", "down_proj.bias")):
            assert all(torch.equal(part, whole) for part in parts), name
            continue
        joined = torch.cat(parts, dim=1 if kind in ("o_proj", "down_proj") else 0)
        assert torch.equal(joined[: len(whole)], whole) and not joined[len(whole) :].any(), name
        assert len({part.shape for part in parts}) == 1 and parts[0].numel() * size < whole.numel() * 1.01, name
    assert len(seen) == 12


@since(7)
def test_neighbours_share_a_key_value_head(subject: Subject, story_model: Path) -> None:
    """Heads 0 and 1 read the first of two key/value heads; on four ranks each has one of the four."""
    config, cut = read_config(story_model), subject.part("cut")
    rows = torch.arange(2).repeat_interleave(config.head_dim)[:, None]  # the number of the head that a row belongs to
    name = "layers.0.self_attn.k_proj.weight"
    for size, expected in {1: [[0, 1]], 2: [[0], [1]], 4: [[0], [0], [1], [1]]}.items():
        assert [cut(name, rows, config, rank, size).unique().tolist() for rank in range(size)] == expected


@since(7)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("build", ["awkward", "qwen2", "qwen3"])
def test_the_ranks_together_are_the_model(
    subject: Subject, checkpoints: Path, awkward_model: Path, build: str, size: int
) -> None:
    """Every layer of it, on threads: the logits of all ranks side by side are HF's."""
    path = {"awkward": lambda: awkward_model, "qwen2": lambda: random_qwen2(checkpoints, vocab_size=509)}.get(
        build, lambda: lively_qwen3(checkpoints)
    )()
    config = replace(read_config(path), dtype=torch.float32)
    width = -(-config.vocab_size // size)
    borders = [token for rank in range(1, size) for token in (rank * width - 1, rank * width)]
    [tokens] = random_prompts(40)
    tokens += [0, *borders, config.vocab_size - 1]

    def task(group: Threads) -> Tensor:
        model = subject.part("load_share")(path, config, group)
        hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), attend_to_all)
        return model.logits(hidden)

    logits = torch.cat(Threads.run(size, task), dim=-1)  # [T, R * (V / R)]
    oracle.check_logits(logits[:, : config.vocab_size], oracle.truth(path).logits(tokens))
    assert not logits[:, config.vocab_size :].any()
    if build == "awkward":
        assert logits[:, : config.vocab_size].max() < 0


@since(7)
def test_the_best_of_all_ranks(subject: Subject) -> None:
    """Against argmax over everything: negative logits, ties within and between ranks, ranks of nothing but padding."""
    best_of, winners = subject.part("best_of"), subject.part("winners")
    generator = torch.Generator().manual_seed(0)
    for vocab_size in (1, 5, 64, 511):
        for size in (1, 2, 3, 4):
            width = -(-vocab_size // size)
            whole = -torch.randint(1, 9, (40, vocab_size), generator=generator).float()  # many ties
            padded = F.pad(whole, (0, width * size - vocab_size))
            pairs = [best_of(part, rank, vocab_size) for rank, part in enumerate(padded.split(width, dim=1))]
            assert winners(torch.stack(pairs)) == whole.argmax(-1).tolist()
    assert winners(torch.stack([best_of(torch.empty(0, 4), rank, 8) for rank in range(2)])) == []


@since(7)
def test_ids_are_exact_in_half_precision(subject: Subject) -> None:
    """In bf16 the ids above 256 would be rounded."""
    logits = torch.eye(1031, dtype=torch.bfloat16) - 2  # in row i token i is the best
    parts = F.pad(logits, (0, 1)).split(516, dim=1)
    pairs = [subject.part("best_of")(part, rank, 1031) for rank, part in enumerate(parts)]
    assert subject.part("winners")(torch.stack(pairs)) == list(range(1031))


@since(7)
def test_sizes_that_do_not_fit_are_refused(subject: Subject, story_model: Path) -> None:
    """Before a process is started."""
    for size, message in (
        (0, r"tensor_parallel_size.*at least 1.*0"),
        (3, r"tensor_parallel_size=3.*4 heads.*2 key.*choose one of 1, 2, 4$"),
        (8, "=8.*choose one of 1, 2, 4$"),
    ):
        with pytest.raises(ValueError, match=message):
            subject.engine(story_model, tensor_parallel_size=size)
    found = torch.cuda.device_count()
    with pytest.raises(ValueError, match=rf"tensor_parallel_size={found + 1} need {found + 1} CUDA GPUs.*has {found}"):
        subject.engine(story_model, device="cuda", tensor_parallel_size=found + 1)


@since(7)
def test_a_step_is_told_in_few_bytes(subject: Subject) -> None:
    """However long a sequence is, its piece holds the tokens to compute and the block table."""
    seq = Sequence(3, list(range(5000)), 10, greedy(9), seed=1, block_table=list(range(313)), num_computed=4990)
    piece = subject.part("Piece").of(seq, 10)
    assert piece == (4990, list(range(4990, 5000)), seq.block_table)
    other, n = piece.as_work()
    assert n == 10 and other.num_computed == 4990 and other.token_ids[4990:] == seq.token_ids[4990:]


# --- the ranks at work ---


@since(7)
def test_stories_are_hf_s_on_every_number_of_ranks(subject: Subject, story_ranks: Any, story_model: Path) -> None:
    prompts = story_prompts(story_model)[:3]
    outputs = story_ranks.generate(prompts, greedy(20, ignore_eos=True))
    oracle.check_greedy(story_model, prompts, outputs, greedy(20, ignore_eos=True))
    assert len({token for output in outputs for token in output}) > 25
    subject.check_idle(story_ranks)


@since(7)
def test_tensor_parallel_t2_t3_awkward_and_in_tight_quarters(
    subject: Subject, awkward_ranks: Any, awkward_model: Path
) -> None:
    """Chunks, preemption and resumption on a model where padding would win if it could."""
    listener = Listener()
    awkward_ranks.trace.on_event = listener
    params = [greedy(12, ignore_eos=True)] * len(PROMPTS)
    outputs = awkward_ranks.generate(PROMPTS, params)
    oracle.check_greedy(awkward_model, PROMPTS, outputs, params)
    listener.check_end(PROMPTS, outputs, params, awkward_ranks.eos_token_ids)
    assert any(told.preempted for told in listener.requests.values())
    assert len({token for output in outputs for token in output}) > 20
    subject.check_idle(awkward_ranks)


@pytest.mark.slow
@since(7)
def test_tensor_parallel_t2_random_rounds(subject: Subject, awkward_ranks: Any, awkward_model: Path) -> None:
    """Call after call on one engine: shared beginnings, evictions, chunks, preemption, draws; as on one rank."""
    alone = ContinuousBatchingEngine(str(awkward_model), **TINY)
    rng = random.Random(0)
    beginnings = random_prompts(4, 8, 11)
    for _ in range(12):
        prompts = [
            rng.choice(beginnings) + random_prompts(rng.randint(1, 8), seed=rng.randrange(99))[0] for _ in range(5)
        ]
        params = [
            SamplingParams(rng.choice((0.0, 0.0, 1.0)), rng.randint(1, 14), ignore_eos=True, seed=rng.randint(0, 99))
            for _ in prompts
        ]
        assert awkward_ranks.generate(prompts, params) == alone.generate(prompts, params)
        subject.check_idle(awkward_ranks)


@since(7)
def test_draws_are_those_of_one_rank(
    story_ranks: Any, awkward_ranks: Any, story_model: Path, awkward_model: Path
) -> None:
    """Greedy rows and rows that draw in one step; and two engines, each with its own ranks, taking turns (T1)."""
    params = [SamplingParams(t, 6, ignore_eos=True, seed=i) for i, t in enumerate((0.0, 0.8, 0.0, 1.3, 1.0))]
    prompts = random_prompts(3, 9, 2, 11, 6)
    expected = {
        engine: ContinuousBatchingEngine(str(path)).generate(prompts, params)
        for engine, path in ((story_ranks, story_model), (awkward_ranks, awkward_model))
    }
    for engine in (awkward_ranks, story_ranks, awkward_ranks):
        assert engine.generate(prompts, params) == expected[engine]


@since(7)
def test_a_rank_holds_its_part_and_no_more(story_ranks: Any, story_model: Path) -> None:
    """Weights and KV memory; what is not cut (norms) is next to nothing."""
    size = story_ranks.team.size
    whole = sum(tensor.numel() for _, tensor in read_tensors(story_model))
    kv_copies = max(1, size // story_ranks.config.num_key_value_heads)
    ours = sum(p.numel() for p in story_ranks.model.parameters())
    assert whole / size <= ours < whole / size * (1.02 if kv_copies == 1 else 1.1)
    blocks = story_ranks.pool.num_blocks * story_ranks.pool.block_size * story_ranks.config.num_hidden_layers
    heads = story_ranks.config.num_key_value_heads // size * kv_copies or 1
    assert story_ranks.cache.k.numel() == blocks * heads * story_ranks.config.head_dim


@on_linux
@since(7)
def test_a_message_of_any_size(story_ranks: Any, story_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that no pipe holds at once: it is sent while the workers read."""
    prompts = random_prompts(500)
    tell, sizes = story_ranks.team.tell, []

    def tell_more(message: Any) -> None:
        pieces = [p._replace(block_table=p.block_table + list(range(2**20))) for p in message.pieces]
        sizes.append(len(pickle.dumps(pieces)))
        tell(message._replace(pieces=pieces))

    monkeypatch.setattr(story_ranks.team, "tell", tell_more)
    outputs = story_ranks.generate(prompts, greedy(3))
    oracle.check_greedy(story_model, prompts, outputs, greedy(3))
    assert min(sizes) > 2**21


@on_linux
@since(7)
def test_workers_sleep_when_there_is_nothing_to_do(story_ranks: Any) -> None:
    story_ranks.generate([[5]], greedy(2))
    time.sleep(0.2)
    pids = pids_of(story_ranks)
    before = [cpu_seconds(pid) for pid in pids]
    time.sleep(0.5)
    assert all(cpu_seconds(pid) - start < 0.1 for pid, start in zip(pids, before, strict=True))


# --- half precision ---


@pytest.mark.parametrize("size", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (2, 4)])
@since(7)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("attention", ["gather", "triton"])
def test_stories_in_half_precision(
    subject: Subject, story_model: Path, dtype: torch.dtype, attention: str, size: int
) -> None:
    prompts = story_prompts(story_model)
    options = {"tensor_parallel_size": size, "device": "cuda", "dtype": dtype, "attention": attention}
    with subject.engine(story_model, **options) as engine:
        outputs = engine.generate(prompts, greedy(64, ignore_eos=True))
    oracle.check_greedy_half(story_model, prompts, outputs, greedy(64, ignore_eos=True), dtype, "cuda")
