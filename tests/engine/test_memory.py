"""What is set aside before the KV cache gets the rest of a GPU: measured, and computed for what comes later."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm.config import EngineConfig
from nanovllm.models.config import ModelConfig
from nanovllm.runner import memory
from nanovllm.runner.memory import GIB, block_bytes, num_kv_blocks, row_bytes
from nanovllm.runner.rows import Rows

MODEL = ModelConfig(
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    rope_scaling=None,
    tie_word_embeddings=True,
    head_dim=128,
    qk_norm=True,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    moe=None,
    windows=(0,) * 28,
    attention_scale=128**-0.5,
    gemma=None,
    dtype=torch.bfloat16,
)


@pytest.mark.parametrize(("max_num_seqs", "max_model_len", "block_size"), [(3, 100, 16), (512, 131072, 256)])
def test_rows_are_counted_in_full(max_num_seqs: int, max_model_len: int, block_size: int) -> None:
    config = EngineConfig(max_num_seqs=max_num_seqs, max_model_len=max_model_len, kvcache_block_size=block_size)
    rows = Rows(max_num_seqs, max_model_len, block_size, 7, torch.device("meta"))
    tables = 2 * rows.block_table.nbytes  # the second is the recorded step's, without the scratch row
    assert row_bytes(config) == rows.token_ids.nbytes + tables


@pytest.mark.parametrize(
    ("share", "others", "expected"),
    [
        (None, 0, 72 - 5),  # 0.9 of the card, less weights and context (3 + 1) and the peak of a step (1)
        (None, 40, 32 - 5),  # the card is not to be fuller than that, whoever fills it
        ("0.25", 0, 20 - 5),
        ("0.25", 20, 20 - 5),  # what others have is not of our share
        ("0.25", 59, 72 - 59 - 5),  # but less is left than that
    ],
)
def test_people_have_a_share_each(
    share: str | None, others: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card of 80 GiB, on which other processes have some."""
    monkeypatch.delenv(memory.SHARE, raising=False)
    if share is not None:
        monkeypatch.setenv(memory.SHARE, share)
    for name, value in {"max_memory_allocated": 4, "memory_allocated": 3, "memory_reserved": 3}.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: ((80 - 4 - others) * GIB, 80 * GIB))
    for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    within = []  # of a context in which no kernel is launched, and so none is compiled by this process alone

    @contextmanager
    def without_launches(device: torch.device) -> Iterator[None]:
        within.append(device)
        yield
        within.clear()

    def largest_step() -> None:
        assert within == [torch.device("cuda")]

    monkeypatch.setattr(memory, "without_launches", without_launches)
    assert memory.gpu_budget(EngineConfig(), torch.device("cuda"), largest_step) == expected * GIB


def test_blocks_get_what_rows_and_graphs_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 rows of 131,072 tokens are a quarter of a GiB, and the lists of tokens whose scores they may edit three times
    as much, which the KV cache must not have as well."""
    monkeypatch.setattr(memory, "gpu_budget", lambda *_: 10 * GIB)

    def blocks(max_model_len: int, with_graphs: bool) -> int:
        config = EngineConfig(max_model_len=max_model_len, kvcache_block_size=256)
        return num_kv_blocks(config, MODEL, None, torch.device("cuda"), lambda: None, with_graphs)

    each = block_bytes(MODEL, 256)
    assert each == 2 * 28 * 256 * 8 * 128 * 2
    less = (blocks(4096, False) - blocks(131072, False)) * each
    assert abs(less - (513 + 3 * 512) * (131072 - 4096) * 4) < 2 * each
    assert (blocks(4096, False) - blocks(4096, True)) * each > 512 * 151936 * 2


def test_a_cache_larger_than_the_memory_of_a_container_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its limit counts, where it has one; and all ranks are in it."""
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "CONTAINER_LIMITS", [tmp_path / "none", limit])
    own = memory.memory_of_machine()
    limit.write_text("max\n")
    assert memory.memory_of_machine() == own > GIB
    limit.write_text(f"{GIB // 2}\n")
    config = EngineConfig(kv_cache_gib=0.3, max_num_seqs=4, max_model_len=100, kvcache_block_size=16)
    memory.check_memory(config, MODEL, 1)
    with pytest.raises(ValueError, match=r"^kv_cache_gib=0.3 .* need 0.6 GiB on 2 ranks, and .* 0.5 GiB; lower one"):
        memory.check_memory(replace(config, tensor_parallel_size=2), MODEL, 1)
    with pytest.raises(ValueError, match=r"^num_kv_blocks=600 .* need 0.6 GiB, and this machine has 0.5 GiB"):
        memory.check_memory(replace(config, num_kv_blocks=600), MODEL, 2**20)
    many = replace(config, max_num_seqs=6000)  # 4 MB of tokens and tables, and 38 KB a row for what sampling keeps
    with pytest.raises(ValueError, match=r"^kv_cache_gib=0.3 and max_num_seqs=6000 need 0.5 GiB, .* lower one"):
        memory.check_memory(many, MODEL, 1)


@pytest.mark.parametrize("answer", [-1, OSError])
def test_where_nothing_says_how_much_memory_there_is_nothing_is_refused(
    answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sysconf(name: str) -> int:
        if answer == -1:
            return -1
        raise answer

    monkeypatch.setattr(memory.os, "sysconf", sysconf)
    monkeypatch.setattr(memory, "CONTAINER_LIMITS", [])
    assert memory.memory_of_machine() == math.inf
