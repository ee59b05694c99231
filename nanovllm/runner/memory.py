"""How large the KV cache may be: what weights and the largest step leave of the memory."""

import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.graphs.sizes import StepSizes, draft_sizes, step_sizes
from nanovllm.kernels import without_launches
from nanovllm.models.config import ModelConfig
from nanovllm.models.transformer import Transformer
from nanovllm.sampling.acceptance import accept_or_resample
from nanovllm.sampling.sampler import sample_plain
from nanovllm.sampling.state import SamplingMetadata
from nanovllm.sampling_params import MAX_BAD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_IDS
from nanovllm.startup import part_of_start

MIB = 2**20
GIB = 2**30
SHARE = "NANOVLLM_GPU_MEMORY"
CANDIDATES = 4096  # per row of logits that there is room for, see kernels/fused/threshold.py
CONTAINER_LIMITS = [Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory/memory.limit_in_bytes")]
CONTEXT = GIB  # the most that counts as CUDA's own memory of this process: the driver tells only the sum of all


def block_bytes(model: ModelConfig, block_size: int, fp8: bool = False) -> int:
    """Bytes of one KV block over all layers of a model: keys and values, in the model's dtype or in FP8."""
    values = 2 * model.num_hidden_layers * block_size * model.num_key_value_heads * model.head_dim
    return values * (1 if fp8 else model.dtype.itemsize)


def graph_bytes(sizes: StepSizes, model: ModelConfig) -> int:
    """Bytes that recorded steps may take: logits, activations and the matrix library's workspace, which all share; the
    masks that tails read; and the launches themselves, about 10 KB each. A tail has as many launches as a layer."""
    logits = sizes.decodes[-1] * model.vocab_size * model.dtype.itemsize
    masks = sizes.decodes[-1] * (1 + -(-model.vocab_size // 32)) * 4
    with_layers = len(sizes.decodes) + len(sizes.with_prompts) + len(sizes.for_long_contexts)
    launches = (with_layers * model.num_hidden_layers + len(sizes.decodes)) * MIB // 8
    return logits + masks + 320 * MIB + launches


def row_bytes(config: EngineConfig) -> int:
    """What the rows of persistent state take, the scratch row included: known tokens, and two block tables, the second
    for a recorded step. Long contexts make rows large."""
    assert config.max_model_len is not None and config.kvcache_block_size is not None
    tables = 2 * -(-config.max_model_len // config.kvcache_block_size)
    return (config.max_num_seqs + 1) * (config.max_model_len + 1 + tables) * 4


def sampling_bytes(config: EngineConfig, model: ModelConfig, num_logits: int) -> int:
    """What sampling holds beside the logits: lists and masks of the rows, and while a step samples the edits and the
    candidates of each of its rows of logits."""
    assert config.max_model_len is not None
    lists = MAX_STOP_IDS + 2 * MAX_LOGIT_BIAS + MAX_BAD_WORDS + MAX_BAD_TOKENS
    mask = -(-model.vocab_size // 32)
    edited = min(model.vocab_size, config.max_model_len + 1 + MAX_STOP_IDS + MAX_LOGIT_BIAS + MAX_BAD_WORDS)
    state = (config.max_num_seqs + 1) * (lists + mask)
    scratch = num_logits * (3 * edited + 3 * mask + 3 * CANDIDATES)  # cells are as many as words of a mask
    return 4 * (state + scratch)


@part_of_start("measuring memory")
def num_kv_blocks(
    config: EngineConfig,
    model: ModelConfig,
    draft: ModelConfig | None,
    device: torch.device,
    run_largest_step: Callable[[], None],
    with_graphs: bool,
) -> int:
    """Blocks of the pool: as configured, or as many as fit (a scratch block is extra).

    On a CPU `kv_cache_gib` says how much memory they may take. On a GPU `run_largest_step` is run once to see the peak
    of a step, and the blocks get what `gpu_memory_utilization` leaves beside it. Raises ValueError, saying how much is
    missing, if not even one block fits.
    """
    assert config.kvcache_block_size is not None
    size, fp8 = config.kvcache_block_size, config.fp8_kv_cache
    each = sum(block_bytes(m, size, fp8) for m in (model, draft) if m is not None)
    if device.type == "cpu":
        check_memory(config, model, each)
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    if device.type == "cpu":
        available, knob = int(config.kv_cache_gib * GIB), f"kv_cache_gib={config.kv_cache_gib}"
    else:
        sizes = step_sizes(config, model)
        available = gpu_budget(config, device, run_largest_step) - row_bytes(config)
        available -= sampling_bytes(config, model, sizes.num_logits)
        knob = f"gpu_memory_utilization or {SHARE}, or free GPU memory"
        if with_graphs:
            available -= graph_bytes(sizes, model)
            available -= 0 if draft is None else graph_bytes(draft_sizes(config), draft)
    count = available // each - 1
    if count < 1:
        missing = (2 * each - available) / GIB
        raise ValueError(
            f"no room for a KV block of {config.kvcache_block_size} tokens ({each / GIB:.3f} GiB): {missing:.3f} GiB "
            f"are missing; raise {knob}, or lower max_num_batched_tokens, max_num_seqs or kvcache_block_size"
        )
    return count


def check_memory(config: EngineConfig, model: ModelConfig, each: int) -> None:
    """Raises ValueError if the KV cache, whose blocks have so many bytes each, and the rows of persistent state, those
    of sampling included, exceed the memory that there is for all ranks."""
    blocks = config.kv_cache_gib * GIB if config.num_kv_blocks is None else config.num_kv_blocks * each
    of_rows = row_bytes(config) + sampling_bytes(config, model, 0)
    needed, memory = (blocks + of_rows) * config.tensor_parallel_size, memory_of_machine()
    if needed > memory:
        knob = "kv_cache_gib" if config.num_kv_blocks is None else "num_kv_blocks"
        of_ranks = f" on {config.tensor_parallel_size} ranks" if config.tensor_parallel_size > 1 else ""
        raise ValueError(
            f"{knob}={getattr(config, knob)} and max_num_seqs={config.max_num_seqs} need {needed / GIB:.1f} GiB"
            f"{of_ranks}, and this machine has {memory / GIB:.1f} GiB; lower one of them"
        )


def memory_of_machine() -> float:
    """Bytes of this machine, or of this container if it may have less; infinite where nothing says how many."""
    known = [math.inf]
    with suppress(AttributeError, ValueError, OSError):  # Windows has no sysconf, and some systems no such names
        pages = os.sysconf("SC_PHYS_PAGES")
        known += [pages * os.sysconf("SC_PAGE_SIZE")] if pages > 0 else []
    for limit in CONTAINER_LIMITS:
        with suppress(OSError, ValueError):  # there is no such file, or it says "max"
            known.append(int(limit.read_text()))
    return min(known)


def gpu_share(config: EngineConfig) -> float:
    """The share of this process: `gpu_memory_utilization`, or a smaller NANOVLLM_GPU_MEMORY, to share a card.

    Raises ValueError if NANOVLLM_GPU_MEMORY is not a number above 0 and at most 1.
    """
    value = os.environ.get(SHARE)
    if value is None:
        return config.gpu_memory_utilization
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(f"{SHARE}={value!r} must be a number above 0, and 1 at most; set it so, or unset it")
    return min(config.gpu_memory_utilization, share)


def gpu_budget(config: EngineConfig, device: torch.device, run_largest_step: Callable[[], None]) -> int:
    """Bytes for the KV cache, beside the peak of a step. The card gets no fuller than `gpu_memory_utilization` says,
    whoever fills it, and this process gets no more than its share."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    with without_launches(device):  # what our kernels write is not looked at, and their compilation would take seconds
        run_largest_step()
    torch.cuda.synchronize(device)
    step = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    used, ours = total - free, torch.cuda.memory_reserved(device)
    ours += min(used - ours, CONTEXT)
    return min(int(total * config.gpu_memory_utilization) - used, int(total * gpu_share(config)) - ours) - step


@torch.inference_mode()
def run_largest_step(
    model: Transformer, config: EngineConfig, device: torch.device, score_prompts: Callable[[Tensor], None]
) -> None:
    """A step of the largest size, without attention, to see how much memory it takes.

    score_prompts: what it does with the hidden states [T, H] for log-probabilities of prompts.
    """
    assert config.max_model_len is not None
    num_tokens = config.max_num_batched_tokens
    input_ids = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    positions = torch.arange(num_tokens, dtype=torch.int32, device=device) % config.max_model_len
    hidden = model(input_ids, positions, lambda layer, q, k, v: torch.empty_like(q))
    score_prompts(hidden)
    max_sampled = 1 if config.speculation is None else 1 + config.speculation.k
    num_rows = min(config.max_num_seqs * max_sampled, num_tokens)
    logits = model.logits(hidden[:num_rows])
    zeros = torch.zeros(num_rows, dtype=torch.int64, device=device)
    metadata = SamplingMetadata(torch.ones(num_rows, device=device), zeros, zeros)
    if config.speculation is not None and config.speculation.model is not None:
        accept_or_resample(logits.float(), metadata, zeros, logits.float())
    else:
        sample_plain(logits, metadata)
