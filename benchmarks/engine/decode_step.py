"""One recorded decode step, by batch size and context: milliseconds, alternating between variants, and how far its
logits are from those of the first.

    python -m benchmarks.engine.decode_step --out decode_step.json [--at 32,384 --at 256,850] [--variant "keys ahead:
    1 tile"]

Most variants are experiments, and on an H200 none of those in docs/kernels.md gained. Each is recorded anew in every
round, because two recordings of the same kernels differ by some percent.

*Keys ahead*: during the matrix products of a layer the memory is half idle, and which keys the next layer will read is
known. So a few programs beside them ask for the first tiles of every program of the next layer's attention, at a
measured pace, so that the weights need not queue behind them. Prediction for an H100: 13 MB a tile at 3 TB/s, so 4 us
less of a layer for each, 0.1 ms of a step.
*Half batches*, *merged inside*: see `benchmarks/engine/half_batches.py` and `benchmarks/engine/merge_inside.py`.
*Small tiles*: where a program has four tiles only, its start and its end count more than its reading.

*Plain decode kernel* is the engine without `ring_decode`, the kernel for Hopper GPUs. All that was named so far changes
`paged_decode`, so there it is switched off as well, and in records since then this is what to compare them with.
*Ring, nothing early* has `ring_decode`, but its first tiles are ordered when the predecessor has ended.
*Two tiles under way* is `paged_decode` with two programs a multiprocessor, each with two tiles on their way.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.engine import half_batches
from benchmarks.engine.merge_inside import merge_inside
from benchmarks.engine.plain_decode import late_ring, plain_decode
from nanovllm.attention import triton_backend
from nanovllm.attention.interface import AttentionMetadata, Shared
from nanovllm.attention.triton_backend import TritonBackend
from nanovllm.kernels.attention.paged_decode import DecodeConfig, decode_config
from nanovllm.kernels.attention.paged_tile import token_offsets
from nanovllm.kernels.launch import CACHE_LINE
from nanovllm.kernels.prefetch import prefetch

MODEL = Path(__file__).parents[1] / "shapes" / "Qwen3-0.6B"
SIZES = [(1, 384), (8, 384), (16, 384), (32, 384), (64, 850), (128, 850), (256, 850)]
BASE = "as it is"
PLAIN = "plain decode kernel"


@dataclass(frozen=True)
class KeysAhead:
    """Tiles of each program of the attention kernel to ask for, programs that ask, and their pause after each tile."""

    tiles: int
    programs: int
    pause: int  # nanoseconds
    beside: bool = True  # on a stream of their own; else between two kernels of the layer


@triton.jit
def keys_ahead_kernel(  # type: ignore[no-untyped-def]
    kv_ptr, block_table_ptr, context_len_ptr, piece_ptr, num_pieces, v_offset, table_stride,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
    LINES: tl.constexpr, TILES: tl.constexpr, PAUSE: tl.constexpr,
):  # fmt: skip
    line = tl.arange(0, LINES) * (HEAD_DIM // LINES)
    for unit in range(tl.program_id(0), num_pieces * NUM_KV_HEADS, tl.num_programs(0)):
        piece = unit // NUM_KV_HEADS
        tile = tl.load(piece_ptr + piece * 4)
        last = tl.load(piece_ptr + piece * 4 + 1)
        sequence = tl.load(piece_ptr + piece * 4 + 2)
        begin = tl.load(piece_ptr + piece * 4 + 3)
        context_len = tl.load(context_len_ptr + sequence, mask=tile < last, other=0)
        stop_key = tl.minimum(context_len, (tl.minimum(last, tile + TILES) - begin) * KEYS)
        for start in range((tile - begin) * KEYS, stop_key, KEYS):
            table_ptr = block_table_ptr + sequence * table_stride
            offset = token_offsets(table_ptr, start, context_len, NUM_KV_HEADS * HEAD_DIM, BLOCK_SIZE, KEYS)
            offset = tl.where(start + tl.arange(0, KEYS) < context_len, offset, 0) + (unit % NUM_KV_HEADS) * HEAD_DIM
            prefetch(kv_ptr + offset[:, None] + line[None, :])
            prefetch(kv_ptr + v_offset + offset[:, None] + line[None, :])
            if PAUSE:
                tl.inline_asm_elementwise(
                    f"nanosleep.u32 {PAUSE}; mov.u32 $0, $1;", "=r,r", [start], dtype=tl.int32, is_pure=False, pack=1
                )


def ask_ahead(kv: Tensor, meta: AttentionMetadata, plan: Tensor, how: KeysAhead) -> None:
    _, _, block_size, num_kv_heads, head_dim = kv.shape
    keys_ahead_kernel[(how.programs,)](
        kv, meta.block_table, meta.context_len, plan, plan.shape[0], kv.stride(0), meta.block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        KEYS=decode_config(head_dim, kv.element_size()).keys, LINES=max(1, head_dim * kv.element_size() // CACHE_LINE),
        TILES=how.tiles, PAUSE=how.pause, num_warps=4,
    )  # fmt: skip


@contextmanager
def keys_ahead(how: KeysAhead, kvs: list[Tensor]) -> Iterator[torch.cuda.Stream | None]:
    """Each layer's attention asks for the next layer's keys. Yields the stream that does it, if it has its own."""
    side = torch.cuda.Stream()
    following = {kv.data_ptr(): after for kv, after in pairwise(kvs)}
    attend = TritonBackend.attend

    def patched(
        self: TritonBackend, q: Tensor, kv: Tensor, meta: AttentionMetadata, scale: float, shared: Shared | None = None
    ) -> Tensor:
        out = attend(self, q, kv, meta, scale, shared)
        after = following.get(kv.data_ptr())
        if after is not None and shared is not None and not how.beside:
            ask_ahead(after, meta, shared["decode plan"], how)
        elif after is not None and shared is not None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                ask_ahead(after, meta, shared["decode plan"], how)
        return out

    TritonBackend.attend = patched  # type: ignore[method-assign]
    try:
        with plain_decode():  # whose plan `ask_ahead` goes by
            yield side if how.beside else None
    finally:
        TritonBackend.attend = attend  # type: ignore[method-assign]


@contextmanager
def decode_layout(config: DecodeConfig, _: list[Tensor]) -> Iterator[None]:
    usual = triton_backend.decode_config
    triton_backend.decode_config = lambda *_: config
    try:
        with plain_decode():
            yield
    finally:
        triton_backend.decode_config = usual


# Each changes the engine while a step is recorded. What it yields, if anything, is a stream that the step ends with.
Variant = Callable[[list[Tensor]], AbstractContextManager[torch.cuda.Stream | None]]
VARIANTS: dict[str, Variant] = {
    BASE: lambda _: nullcontext(),
    PLAIN: plain_decode,
    "keys ahead: 1 tile": partial(keys_ahead, KeysAhead(1, 32, 800)),
    "keys ahead: 2 tiles": partial(keys_ahead, KeysAhead(2, 32, 800)),
    "keys ahead: 2 tiles, slowly": partial(keys_ahead, KeysAhead(2, 16, 800)),
    "keys ahead: 2 tiles, at once": partial(keys_ahead, KeysAhead(2, 64, 0)),
    "keys ahead: 2 tiles, fast": partial(keys_ahead, KeysAhead(2, 64, 800)),
    "keys ahead: 3 tiles, fast": partial(keys_ahead, KeysAhead(3, 64, 800)),
    "keys ahead: 1 tile, between": partial(keys_ahead, KeysAhead(1, 128, 0, beside=False)),
    **half_batches.VARIANTS,
    "merged inside": merge_inside,
    "small tiles": partial(decode_layout, DecodeConfig(32, 4, 3, 4)),
    "few programs": partial(decode_layout, DecodeConfig(64, 4, 4, 2)),
}
RING_VARIANTS: dict[str, Variant] = {  # what `ring_decode` is compared with
    "ring, nothing early": late_ring,
    "two tiles under way": partial(decode_layout, DecodeConfig(64, 4, 5, 2)),
    "halves, ring": half_batches.HALVES_RING,
}
VARIANTS |= RING_VARIANTS


def milliseconds(replay: Callable[[], object], calls: int = 40) -> float:
    for _ in range(5):
        replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / calls


def measure(sizes: list[tuple[int, int]], names: list[str], rounds: int) -> list[dict[str, Any]]:
    from nanovllm import LLM
    from nanovllm.graphs.cuda_graphs import CudaGraphRecorder

    llm = LLM(str(MODEL), load_format="dummy", skip_tokenizer_init=True)
    runner: Any = llm.engine.executor.runner
    rows, graphs = runner.rows, runner.graphs
    rows.block_table[rows.scratch_row] = runner.num_kv_blocks
    rows.temperature.fill_(0.6)
    found = []
    for kv in runner.kv:
        kv.normal_()
    for batch_size, context in sizes:
        batch = graphs.batches[batch_size]
        columns = -(-context // rows.block_size)
        blocks = torch.randperm(runner.num_kv_blocks)[: batch_size * columns]  # in any order, as after hours of service
        rows.block_table[:batch_size, :columns] = blocks.view(batch_size, columns).int().to(rows.device)
        times: dict[str, list[float]] = {name: [] for name in names}
        logits: dict[str, Tensor] = {}
        for name in names * rounds:
            graphs._load(batch, [])
            with VARIANTS[name](runner.kv) as side:

                def step(batch: Any = batch, side: torch.cuda.Stream | None = side) -> Any:
                    outputs = runner.decode(batch)
                    if side is not None:
                        torch.cuda.current_stream().wait_stream(side)
                    return outputs

                replay = CudaGraphRecorder()(step)
            graphs._load(batch, [(row, context - 1) for row in range(batch_size)])
            times[name].append(milliseconds(replay))
            logits[name] = replay()[1].float().clone()
        scale = logits[names[0]].abs().max()
        for name in names:
            row = {"batch": batch_size, "context": context, "variant": name, "milliseconds": times[name]}
            row["differs"] = float((logits[name] - logits[names[0]]).abs().max() / scale)  # of the largest logit
            found.append(row)
            print(
                f"batch {batch_size:>3}, context {context}: {median(times[name]):.3f} ms {name}, "
                f"its logits differ by {row['differs']:.1%}",
                flush=True,
            )
    llm.close()
    return found


def pair(text: str) -> tuple[int, int]:
    batch, context = map(int, text.split(","))
    return batch, context


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.decode_step", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument(
        "--at", type=pair, action="append", metavar="BATCH,CONTEXT", help="batch sizes are the engine's"
    )
    parser.add_argument("--variant", choices=VARIANTS, action="append", help="(default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commit", help="the commit that is measured, where there is no git")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.engine.decode_step measures a GPU, and this machine has none", file=sys.stderr)
        return 2
    from benchmarks.lib.harness import commit
    from benchmarks.lib.worker import facts

    tested = {"hash": options.commit, "modified": False} if options.commit else commit()
    with torch.inference_mode():
        rows = measure(options.at or SIZES, options.variant or list(VARIANTS), options.rounds)
    result = {"machine": facts("cuda"), "commit": tested, "rows": rows}
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
