"""The decode step, recorded once for each of a ladder of batch sizes, and replayed.

A decode step is hundreds of small kernels, and starting them one by one takes longer than running them. A CUDA graph
starts them all with one call. What it replays are the very same launches on the very same memory: so everything that
changes from step to step is read from tensors that stay where they are, and a batch is padded to the next size that was
recorded, with the scratch row, which writes to the scratch block.

A step that verifies guesses, or computes a short prompt or the rest of one, is replayed as well: every token is a
decode of its own, in the row of its sequence, one position further. The keys of all of them are written before any is
read, so each sees those before it. What this costs is that a context is read once for every token, instead of once for
all. So it is done up to `MAX_REPLAYED` tokens and `MAX_READ` bytes, where launching would take longer. Larger steps
with prompts are for `chunk_graphs.py`.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from nanovllm.attention.interface import AttentionMetadata
from nanovllm.config import EngineConfig
from nanovllm.engine.plan import Scheduled
from nanovllm.kernels import fused_kernels
from nanovllm.runner.batch import make_batch
from nanovllm.runner.rows import Rows, decode_inputs_reference, to_device

if TYPE_CHECKING:
    from nanovllm.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

COPIES_IN_FLIGHT = 3  # one step runs, one is submitted, one is being written
# Tokens of a recorded step in which a sequence has several, and bytes of keys and values that they may read of a layer,
# each token by itself. On an H200 that many bytes take a quarter of a millisecond, and launching a layer a third of one
# (README.md: a token at batch 1 without CUDA graphs, by 28 layers). A larger step is for `chunk_graphs.py`, or launched
# kernel by kernel, which is slower even on an H200 (docs/speculation.md).
MAX_REPLAYED = 256
MAX_READ = 2**30


class DecodeBatch:
    """Static tensors of B decodes, each of one token in some row, over memory that all sizes share."""

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


def batch_sizes(num_decodes: int, largest: int) -> list[int]:
    """The sizes to record: dense up to `num_decodes`, where padding would cost most; then, for steps in which a
    sequence has several tokens, doubled up to `largest`."""
    sizes = [1, 2, 4, *range(8, min(num_decodes, 256), 8), *range(256, num_decodes, 16)]
    sizes = [*(s for s in sizes if s < num_decodes), num_decodes]
    while sizes[-1] < largest:
        sizes.append(min(2 * sizes[-1], largest))
    return sizes


def recorded_sizes(config: EngineConfig) -> list[int]:
    """How many tokens the recorded steps have: one of each sequence, or guesses as well, or of prompts."""
    max_draws = 1 if config.speculation is None else 1 + config.speculation.k
    num_decodes = max(config.max_num_seqs, min(config.max_num_seqs * max_draws, MAX_REPLAYED))
    return batch_sizes(num_decodes, min(MAX_REPLAYED, config.max_num_batched_tokens))


class Replayed(NamedTuple):
    """What a replayed step sampled, N tokens: of each sequence that samples, behind the last known one and behind every
    guess. The next replay overwrites them."""

    sampled_rows: Tensor  # [N] int32
    next_positions: Tensor  # [N] int32, where in its row each of them went
    token_ids: Tensor  # [N] int64
    logits: Tensor  # [N, V]
    guesses: Tensor  # [N] int64: what stood there before; for speculation only


def host_buffers(length: int, copies: int, device: torch.device) -> Iterator[Tensor]:
    """Buffers [length] int32 on the host, in turns for ever: what is sent from one must not change on its way."""
    pinned = device.type == "cuda"
    return cycle([torch.zeros(length, dtype=torch.int32, pin_memory=pinned) for _ in range(copies)])


class DecodeGraphs:
    """A recording for each of some batch sizes.

    sizes: ascending. most_keys: how many keys the tokens of sequences that have several may read together, each token
    by itself; 0 for decodes only. copies: buffers on the host, one more than the steps that it may be ahead.
    """

    def __init__(
        self,
        rows: Rows,
        sizes: list[int],
        step: DecodeStep,
        recorder: Recorder,
        most_keys: int = 0,
        copies: int = COPIES_IN_FLIGHT,
    ) -> None:
        self.rows = rows
        self.sizes, self.most_keys = sizes, most_keys
        largest, device, num_columns = sizes[-1], rows.device, rows.block_table.shape[1]
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
        self._host = host_buffers(2 * largest, copies, device)
        self.batches = {size: DecodeBatch(size, rows, packed, shared) for size in self.sizes}
        self._replays: dict[int, Callable[[], tuple[Tensor, Tensor]]] = {}
        # The largest first: the smaller ones then fit into the memory that it left in the pool.
        for size in tqdm(self.sizes[::-1], desc="recording decode steps", disable=device.type == "cpu", leave=False):
            batch = self.batches[size]
            self._load(batch, [])
            self._replays[size] = recorder(lambda batch=batch: step(batch))  # type: ignore[misc]

    def replay(self, scheduled: Sequence[Scheduled]) -> Replayed | None:
        """Compute this work, if it fits a recording and replaying it is worth it; else None, and nothing is done."""
        several = [s for s in scheduled if s.num_tokens > 1 or not s.sample]
        if not several:  # almost always
            return self._replay_all([(s.row, s.start) for s in scheduled])
        tokens = self._tokens(scheduled, several)
        if tokens is None:
            return None
        behind = [s.sample and i >= s.num_tokens - len(s.guesses) - 1 for s in scheduled for i in range(s.num_tokens)]
        if all(behind):
            return self._replay_all(tokens)
        # A recording samples behind every token. Where that was not asked for, what stood there is put back.
        array, chosen = np.array(tokens, dtype=np.int32), np.array(behind)
        row, before = to_device(array[~chosen].T.copy(), self.rows.device)
        known = self.rows.token_ids[row, before + 1]
        batch, token_ids, logits = self.run(tokens)
        self.rows.token_ids[row, before + 1] = known
        index = to_device(np.flatnonzero(chosen), self.rows.device)
        of_batch = batch.sampled_rows, batch.next_positions, token_ids, logits, batch.guesses
        return Replayed(*(tensor[index] for tensor in of_batch))

    def _replay_all(self, tokens: list[tuple[int, int]]) -> Replayed:
        """`run`, where something is sampled behind every token."""
        batch, token_ids, logits = self.run(tokens)
        n = len(tokens)
        rows, positions = batch.sampled_rows[:n], batch.next_positions[:n]
        return Replayed(rows, positions, token_ids[:n], logits[:n], batch.guesses[:n])

    def _tokens(self, scheduled: Sequence[Scheduled], several: list[Scheduled]) -> list[tuple[int, int]] | None:
        """Row and position of every token of the step, those of a row side by side and in order: `ring_decode` relies
        on it. None if there are too many, or they would read too much."""
        longer = [s for s in several if s.num_tokens > 1]
        num_tokens = sum(s.num_tokens for s in scheduled)
        keys = sum(s.num_tokens * (s.start + s.num_tokens) for s in longer)
        most = MAX_REPLAYED if longer else num_tokens
        if num_tokens > min(most, self.sizes[-1]) or keys > self.most_keys:
            return None
        return [(s.row, s.start + i) for s in scheduled for i in range(s.num_tokens)]

    def run(self, tokens: list[tuple[int, int]]) -> tuple[DecodeBatch, Tensor, Tensor]:
        """Replay the smallest recording that has room for these decodes, each a row and the position that it computes:
        its batch, token ids [B], logits [B, V]."""
        batch = self.batches[self.sizes[bisect_left(self.sizes, len(tokens))]]
        self._load(batch, tokens)
        return batch, *self._replays[batch.size]()

    def _load(self, batch: DecodeBatch, tokens: list[tuple[int, int]]) -> None:
        """Send rows and positions to the device, in one copy. The rest of the batch is the scratch row."""
        host = next(self._host)
        array = host.numpy()[: 2 * batch.size].reshape(2, batch.size)
        n = len(tokens)
        if n:
            array[:, :n] = np.array(tokens, dtype=np.int32).T
        array[0, n:] = self.rows.scratch_row
        array[1, n:] = 0
        batch.packed.copy_(host[: 2 * batch.size], non_blocking=True)


# Steps as they are launched without a recording, by the tokens of each sequence: one for each different set of kernels
# and compiled variants that such steps can need.
UNRECORDED = [
    (1, 32), (32,), (17,) * 33, (1,) * 16, (1,) * 33, (2,), (2,) * 16, (2,) * 33, (17,), (65,), (129,),
]  # fmt: skip


@torch.inference_mode()
def warm_up(runner: "ModelRunner", max_num_tokens: int) -> None:
    """Launch one step of each kind in `UNRECORDED`, except those that the configuration does not allow.

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
