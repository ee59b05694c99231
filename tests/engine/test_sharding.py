"""What each rank has of a model, and that the ranks together are the model. Without processes: ranks are threads."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanovllm import LLM
from nanovllm.distributed.group import Group, PeerLost
from nanovllm.models import loader
from nanovllm.models.config import read_config
from nanovllm.models.loader import load_model
from nanovllm.models.sharding import read_shard, shard_config, with_expert_parallel
from nanovllm.sampling.sampler import gather_logits, sample_plain, sample_sharded
from nanovllm.sampling.state import SamplingMetadata
from tests import oracle
from tests.engine.ranks import STORY_MODEL, engine_checkpoints
from tests.models.plain_attention import DictAttention
from tests.stages.ranks import Threads, awkward_checkpoint
from tests.stages.requests import random_prompts
from tests.weights import lively_qwen3, lively_qwen3_moe, random_mixtral, random_qwen2, random_qwen2_moe

__all__ = ["engine_checkpoints"]  # a fixture

CPU = torch.device("cpu")
BUILDS: dict[str, Callable[[Path], Path]] = {
    "awkward": awkward_checkpoint,  # 511 tokens, a bias wherever there can be one, one key/value head, logits < 0
    "qwen2": lambda directory: random_qwen2(directory, vocab_size=509),
    "qwen3": lively_qwen3,
    "story": lambda directory: STORY_MODEL,
    "qwen3_moe": lambda directory: lively_qwen3_moe(directory, mlp_only_layers=[0], norm_topk_prob=True),
    "qwen2_moe": random_qwen2_moe,
    "mixtral": random_mixtral,
    "experts in one tensor": lambda directory: lively_qwen3_moe(directory, experts_apart=False),
}


class OpenFile:
    """Stands for an open safetensors file, counts what is read of each tensor, and gives no tensor whole."""

    def __init__(self, tensors: dict[str, Tensor], read: dict[str, int]) -> None:
        self.tensors, self.read, self.name = tensors, read, ""

    def __enter__(self) -> "OpenFile":
        return self

    def __exit__(self, *error: object) -> None: ...

    def keys(self) -> list[str]:
        return list(self.tensors)

    def get_slice(self, name: str) -> "OpenFile":
        part = OpenFile(self.tensors, self.read)
        part.name = name
        return part

    def get_shape(self) -> list[int]:
        return list(self.tensors[self.name].shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        part = self.tensors[self.name][index]
        self.read[self.name] = self.read.get(self.name, 0) + part.numel()
        return part


@pytest.mark.parametrize("size", [2, 4])
def test_the_parts_of_every_tensor_are_the_tensor(engine_checkpoints: Path, size: int) -> None:
    """Laid side by side; but for copies of the one key/value head, and for zeros under the last token."""
    path = awkward_checkpoint(engine_checkpoints)
    config, tensors = read_config(path), load_file(path / "model.safetensors")
    kinds = set()
    for name, whole in tensors.items():
        parts = [read_shard(name, OpenFile(tensors, {}).get_slice(name), config, rank, size) for rank in range(size)]
        kind = name.split(".")[-2]
        kinds.add(kind)
        if kind in ("k_proj", "v_proj") or "norm" in kind or name.endswith(("o_proj.bias", "down_proj.bias")):
            assert all(torch.equal(part, whole) for part in parts), name
            continue
        joined = torch.cat(parts, dim=1 if kind in ("o_proj", "down_proj") else 0)
        assert torch.equal(joined[: len(whole)], whole) and not joined[len(whole) :].any(), name
        assert len({part.shape for part in parts}) == 1
    assert len(kinds) == 12


def test_a_tied_head_that_is_the_only_embedding_is_shared_out(engine_checkpoints: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(lively_qwen3(engine_checkpoints, tie_word_embeddings=True), tmp_path / "model"))
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = embedding = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    def share(group: Any) -> Tensor:
        return load_model(path, group=group).model.embed_tokens.weight

    parts = Threads.run(2, share)
    assert torch.equal(torch.cat(parts), embedding.float())


WHOLE = ("mixtral", 4), ("qwen2_moe", 2), ("experts in one tensor", 2)  # ranks that have whole experts


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("build", BUILDS)
def test_the_ranks_together_are_the_model(engine_checkpoints: Path, build: str, size: int) -> None:
    """Every layer of it: the logits of all ranks side by side are HF's, also of the tokens beside a border."""
    path = BUILDS[build](engine_checkpoints)
    config = read_config(path)
    width = -(-config.vocab_size // size)
    [prompt] = random_prompts(40)
    prompt += [token for rank in range(1, size) for token in (rank * width - 1, rank * width)]
    prompt += [0, config.vocab_size - 1]

    def task(group: Any) -> Tensor:
        model = load_model(path, dtype=torch.float32, expert_parallel=(build, size) in WHOLE, group=group).model
        hidden = model(torch.tensor(prompt), torch.arange(len(prompt)), DictAttention())
        return gather_logits(model.logits(hidden), group, config.vocab_size)

    for logits in Threads.run(size, task):
        oracle.check_logits(logits, oracle.truth(path).logits(prompt))
    if build == "awkward":
        assert logits.max() < 0


@pytest.mark.parametrize(
    ("build", "size", "whole"),
    [
        *((build, size, False) for build in ("qwen3", "qwen2_moe", "experts in one tensor") for size in (2, 4)),
        ("qwen2_moe", 2, True),
        ("mixtral", 4, True),
        ("experts in one tensor", 4, True),
    ],
)
def test_a_rank_reads_and_holds_no_more_than_its_share(
    engine_checkpoints: Path, monkeypatch: pytest.MonkeyPatch, size: int, build: str, whole: bool
) -> None:
    """whole: whether it has whole experts, and reads nothing of the others."""
    path = BUILDS[build](engine_checkpoints)
    tensors = load_file(path / "model.safetensors")
    read: dict[str, int] = {}
    monkeypatch.setattr(loader, "safe_open", lambda *_, **__: OpenFile(tensors, read))
    config = read_config(path)
    num_experts = config.moe.num_experts if whole and config.moe is not None else 0

    def holder(name: str) -> int | None:
        """The rank that has this tensor, of a whole expert; None: each has a part of it."""
        numbers = [i for i in range(num_experts) if f".experts.{i}." in name]
        return numbers[0] // (num_experts // size) if numbers else None

    for rank in range(size):
        read.clear()
        group = Group(rank, size, CPU)
        model = load_model(path, dtype=torch.float32, expert_parallel=whole, group=group).model
        assert read.keys() == {name for name in tensors if holder(name) in (None, rank)}
        for name, numel in read.items():
            uncut = "norm" in name or name.endswith(("gate.weight", "o_proj.bias")) or holder(name) == rank
            parts = 1 if uncut else min(size, 2) if "k_proj" in name or "v_proj" in name else size
            assert numel * parts == tensors[name].numel(), name
        assert sum(p.numel() for p in model.parameters()) == sum(read.values())


def check_choices(whole: Tensor, metadata: SamplingMetadata, size: int) -> None:
    """logits [N, V], of which row 3, 4 and 6 are bad."""
    vocab_size, width = whole.shape[1], -(-whole.shape[1] // size)
    padded = torch.nn.functional.pad(whole, (0, width * size - vocab_size))  # zeros, above all logits
    zero = torch.zeros_like(metadata.temperature)

    def task(group: Any) -> list[Tensor]:
        own = padded.split(width, dim=1)[group.rank].contiguous()
        greedy = SamplingMetadata(zero, metadata.seeds, metadata.indices, all_greedy=True)
        chosen = [sample_sharded(own.clone(), how, group, vocab_size) for how in (metadata, greedy)]
        return [*chosen, gather_logits(own, group, vocab_size)]

    for drawn, greedy, gathered in Threads.run(size, task):
        assert torch.equal(drawn, sample_plain(whole, metadata))
        assert torch.equal(greedy, sample_plain(whole, SamplingMetadata(zero, metadata.seeds, metadata.indices)))
        assert torch.equal(gathered.nan_to_num(7), whole.nan_to_num(7))
        assert drawn[3] == drawn[4] == drawn[6] == -1


def test_ranks_choose_what_one_would() -> None:
    """Ties within and between ranks, ranks of nothing but padding, all logits negative, draws, rows that are bad."""
    generator = torch.Generator().manual_seed(0)
    n = 40
    for vocab_size in (1, 5, 64, 511):
        whole = -torch.randint(1, 9, (n, vocab_size), generator=generator).float()  # many ties
        whole[3, vocab_size // 2], whole[4, -1], whole[5, 0] = float("nan"), float("inf"), -torch.inf
        whole[6] = -torch.inf
        temperature = torch.tensor([0.0, 1.0]).repeat(n // 2)
        metadata = SamplingMetadata(temperature, torch.arange(n) * 7919, torch.arange(n) % 5)
        for size in (2, 3, 4):
            check_choices(whole, metadata, size)


def test_sizes_that_do_not_fit_are_refused(engine_checkpoints: Path) -> None:
    """Before a process is started."""
    config = read_config(STORY_MODEL)
    for size in (3, 8):
        with pytest.raises(ValueError, match=rf"tensor_parallel_size={size}.*4 heads.*2 key/value"):
            shard_config(config, size)
        with pytest.raises(ValueError, match=f"tensor_parallel_size={size}"):
            LLM(STORY_MODEL, device="cpu", tensor_parallel_size=size)
    for size, share in {2: 1, 4: 1}.items():
        cut = shard_config(config, size)
        assert (cut.num_attention_heads, cut.num_key_value_heads) == (4 // size, share)
    experts = read_config(lively_qwen3_moe(engine_checkpoints, num_attention_heads=16, num_key_value_heads=16))
    with pytest.raises(ValueError, match=r"16 key/value heads and 96 and 24 neurons; choose one of 1, 2, 4, 8"):
        shard_config(experts, 16)
    whole = with_expert_parallel(experts)
    assert shard_config(whole, 8).neurons_of_token == 3 * 24 // 8
    with pytest.raises(
        ValueError, match=r"enable_expert_parallel=True: 8 experts .* tensor_parallel_size=16 .*1, 2, 4, 8,"
    ):
        shard_config(whole, 16)
    path = random_qwen2_moe(engine_checkpoints)
    with pytest.raises(ValueError, match=r"6 experts .* tensor_parallel_size=4 ranks; choose one of 1, 2, or leave"):
        LLM(path, device="cpu", tensor_parallel_size=4, enable_expert_parallel=True)
    with pytest.raises(ValueError, match=r"enable_expert_parallel=True: this model has no experts; leave .* out"):
        LLM(STORY_MODEL, device="cpu", enable_expert_parallel=True)
    with pytest.raises(ValueError, match=r"tensor_parallel_size.*at least 1"):
        LLM(STORY_MODEL, device="cpu", tensor_parallel_size=0)


def test_a_rank_without_the_others_says_so() -> None:
    group = Group(0, 2, CPU)
    assert not group.connected
    with pytest.raises(PeerLost, match="not connected"):
        group.all_reduce(torch.zeros(1))
    assert Group(0, 1, CPU).connected and Group(0, 1, CPU).smallest(3) == 3
