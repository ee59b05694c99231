"""The decode step, recorded once for each of a ladder of batch sizes, and replayed.

A decode step is hundreds of small kernels, and starting them one by one takes longer than running them. A CUDA graph
starts them all with one call. What it replays are the very same launches on the very same memory: so everything that
changes from step to step is read from tensors that stay where they are, and a batch is padded to the next size that was
recorded, with the scratch row, which writes to the scratch block.

A step that verifies guesses is replayed as well: every guess is a decode of its own, in the row of its sequence, one
position further. The keys of all of them are written before any is read, so each sees those before it. What this costs
is that a context is read once for every guess, instead of once for all; so it is done where launches cost more.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from nanovllm.attention.interface import AttentionMetadata
from nanovllm.config import EngineConfig
from nanovllm.engine.plan import Scheduled
from nanovllm.kernels import fused_kernels
from nanovllm.runner.batch import make_batch
from nanovllm.runner.rows import Rows, decode_inputs_reference

if TYPE_CHECKING:
    from nanovllm.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

COPIES_IN_FLIGHT = 3  # one step runs, one is submitted, one is being written
# Tokens, guesses included, of a recorded step that verifies. A larger one is launched kernel by kernel, which an H200
# still feels (docs/speculation.md): but each of its tokens would read a context by itself.
MAX_VERIFIED = 256


class DecodeBatch:
    """Static tensors of B rows that decode one token each, over memory that all sizes share."""

    def __init__(self, size: int, rows: Rows, packed: Tensor, shared: dict[str, Tensor]) -> None:
        self.size = size
        self.packed = packed[: 2 * size]
        self.sampled_rows, self.positions = self.packed.view(2, size).unbind()  # [B] int32 each
        self.input_ids = shared["input_ids"][:size]  # [B] int32
        self.next_positions = shared["context_len"][:size]  # [B] int32: the token goes right behind the context
        self.guesses = shared["guesses"][:size]  # [B] int64: what stood there before; for speculation only
        self.attention = AttentionMetadata(
            slots=shared["slots"][:size],
            query_start=shared["query_start"][: size + 1],
            context_len=shared["context_len"][:size],
            block_table=shared["block_table"][:size],
            num_decodes=size,
            max_query_len=1,
            max_context_len=rows.token_ids.shape[1] - 1,
        )

    def look_up(self, rows: Rows) -> None:
        """Fill in what follows from rows and positions. On the device, as part of what is recorded."""
        look_up = fused_kernels(rows.device).decode_inputs or decode_inputs_reference
        meta = self.attention
        look_up(
            self.sampled_rows, self.positions, rows.token_ids, rows.block_table, rows.block_size,
            self.input_ids, meta.slots, meta.context_len, meta.block_table,
        )  # fmt: skip


# Runs a decode step on the tensors of a batch: (token ids [B] int64, logits [B, V]).
DecodeStep = Callable[[DecodeBatch], tuple[Tensor, Tensor]]


class Recorder(Protocol):
    """Makes a step replayable: returns what runs it again, and its outputs, which every replay overwrites."""

    def __call__(self, step: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[], tuple[Tensor, Tensor]]: ...


class CudaGraphRecorder:
    """Records into CUDA graphs that share one memory pool: they never run at the same time. Adds each to `recorded`."""

    def __init__(self, recorded: list[torch.cuda.CUDAGraph] | None = None) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.recorded = [] if recorded is None else recorded

    def __call__(self, step: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[], tuple[Tensor, Tensor]]:
        step()  # compiles kernels and lets libraries set themselves up, which a recording must not contain
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            outputs = step()
        self.recorded.append(graph)

        def replay() -> tuple[Tensor, Tensor]:
            graph.replay()
            return outputs

        return replay


def record_nothing(step: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[], tuple[Tensor, Tensor]]:
    """Stands in for a recorder where there is no GPU: a replay runs the step anew."""
    return step


def batch_sizes(largest: int) -> list[int]:
    """The sizes to record: dense where padding would cost most, and always `largest` itself."""
    sizes = [1, 2, 4, *range(8, min(largest, 256), 8), *range(256, largest, 16)]
    return [*(s for s in sizes if s < largest), largest]


def largest_batch(config: EngineConfig) -> int:
    """The most tokens of a recorded step: one of each sequence, or guesses as well."""
    max_draws = 1 if config.speculation is None else 1 + config.speculation.k
    return max(config.max_num_seqs, min(config.max_num_seqs * max_draws, MAX_VERIFIED))


class DecodeGraphs:
    """A recording for each batch size up to `largest`. `copies`: how many steps the host may be ahead, and one more."""

    def __init__(
        self, rows: Rows, largest: int, step: DecodeStep, recorder: Recorder, copies: int = COPIES_IN_FLIGHT
    ) -> None:
        self.rows = rows
        self.sizes = batch_sizes(largest)
        device, num_columns = rows.device, rows.block_table.shape[1]
        on_device = {"dtype": torch.int32, "device": device}
        packed = torch.zeros(2 * largest, **on_device)  # type: ignore[call-overload]
        shared = {
            "input_ids": torch.zeros(largest, **on_device),  # type: ignore[call-overload]
            "slots": torch.zeros(largest, dtype=torch.int64, device=device),
            "context_len": torch.ones(largest, **on_device),  # type: ignore[call-overload]
            "query_start": torch.arange(largest + 1, **on_device),  # type: ignore[call-overload]
            "block_table": torch.zeros(largest, num_columns, **on_device),  # type: ignore[call-overload]
            "guesses": torch.zeros(largest, dtype=torch.int64, device=device),
        }
        pinned = device.type == "cuda"
        self._host = [torch.zeros(2 * largest, dtype=torch.int32, pin_memory=pinned) for _ in range(copies)]
        self._turn = 0
        self.batches = {size: DecodeBatch(size, rows, packed, shared) for size in self.sizes}
        self._replays: dict[int, Callable[[], tuple[Tensor, Tensor]]] = {}
        # The largest first: the smaller ones then fit into the memory that it left in the pool.
        for size in tqdm(self.sizes[::-1], desc="recording decode steps", disable=not pinned, leave=False):
            batch = self.batches[size]
            self._load(batch, [])
            self._replays[size] = recorder(lambda batch=batch: step(batch))  # type: ignore[misc]

    def run(self, tokens: list[tuple[int, int]]) -> tuple[DecodeBatch, Tensor, Tensor]:
        """Replay the smallest recording that has room for these decodes, each a row and the position that it computes:
        its batch, token ids [B], logits [B, V]."""
        batch = self.batches[self.sizes[bisect_left(self.sizes, len(tokens))]]
        self._load(batch, tokens)
        return batch, *self._replays[batch.size]()

    def _load(self, batch: DecodeBatch, tokens: list[tuple[int, int]]) -> None:
        """Send rows and positions to the device, in one copy. The rest of the batch is the scratch row."""
        host = self._host[self._turn]
        self._turn = (self._turn + 1) % len(self._host)
        array = host.numpy()[: 2 * batch.size].reshape(2, batch.size)
        n = len(tokens)
        if n:
            array[:, :n] = np.array(tokens, dtype=np.int32).T
        array[0, n:] = self.rows.scratch_row
        array[1, n:] = 0
        batch.packed.copy_(host[: 2 * batch.size], non_blocking=True)


# Steps that are not recorded, by how many tokens they compute of each sequence: those that differ in what they launch.
UNRECORDED = [(1, 32), (32,), (17,) * 33, (1,) * 33, (2,), (17,), (65,)]


@torch.inference_mode()
def warm_up(runner: "ModelRunner", max_num_tokens: int) -> None:
    """Launch a step of each kind that is not recorded, of those that can come up.

    A kernel is compiled when it is first launched, and no request should wait for that. All is done by the scratch row.
    """
    rows = runner.rows
    longest = rows.token_ids.shape[1] - 1
    for lengths in UNRECORDED:
        work = [Scheduled(-1, rows.scratch_row, 0, min(n, longest), sample=True, new_blocks=()) for n in lengths]
        if len(work) > rows.scratch_row or sum(s.num_tokens for s in work) > max_num_tokens:
            continue
        batch = make_batch(work, rows)
        hidden = runner.model(batch.input_ids, batch.positions, runner.bind_attention(batch.attention))
        logits = runner.model.logits(hidden[batch.sampled_tokens])
        runner.draw(logits, batch.sampled_rows, batch.next_positions)
