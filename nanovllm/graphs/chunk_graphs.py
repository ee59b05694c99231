"""Steps with prompts, recorded for a ladder of numbers of tokens, and replayed.

The kernels of a large step take longer than their launches; with a small model only from thousands of tokens on. Below
that such a step is replayed like a decode step (see `cuda_graphs.py`). How its tokens are shared among its sequences
changes from step to step. So all sequences, decodes too, go through the prefill kernel, whose grid serves any way
to share them. A step that is smaller than its recording is padded: the missing tokens are one sequence of the
scratch row, and the missing sequences have no tokens.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.engine.plan import Scheduled
from nanovllm.graphs.cuda_graphs import COPIES_IN_FLIGHT, Recorder, Replayed, host_buffers
from nanovllm.models.config import ModelConfig
from nanovllm.runner.batch import batch_of, pack

if TYPE_CHECKING:
    from nanovllm.runner.model_runner import ModelRunner

SIZES = (64, 128, 256, *range(384, 1024, 128), *range(1024, 2048, 256), *range(2048, 4097, 512))  # tokens
# Of a recording, one of them the padding; and how many tokens it samples, one behind every guess included. Each place
# costs a little even if it is empty
MAX_SEQUENCES = 64
# Operations that an H200 does, at its measured rate for large products, in about the time that launching a layer kernel
# by kernel takes: a third of a millisecond
OPERATIONS_WHILE_LAUNCHING = 2 * 10**11


def chunk_sizes(config: EngineConfig, model: ModelConfig) -> list[int]:
    """Tokens of the steps to record, ascending: up to where computing takes longer than launching. `model` is this
    rank's share. Empty if that is less than the smallest of `SIZES`."""
    assert config.max_model_len is not None
    heads = 2 * model.num_attention_heads + 2 * model.num_key_value_heads
    weights = model.hidden_size * (heads * model.head_dim + 3 * model.intermediate_size)  # of a layer
    max_tokens = min(config.max_num_batched_tokens, config.max_model_len, OPERATIONS_WHILE_LAUNCHING // (2 * weights))
    return [size for size in SIZES if size <= max_tokens]


class ChunkBatch:
    """Static tensors of a step of T tokens, over memory that all sizes share.

    parts: what `batch.pack` gives, int32, with T tokens, S = `MAX_SEQUENCES` sequences and as many samples.
    """

    def __init__(self, size: int, packed: Tensor, guesses: Tensor) -> None:
        num_seqs = len(guesses)
        self.size, self.guesses = size, guesses  # [S] int64: what stood where tokens are sampled
        self.widths = [size, size, num_seqs, num_seqs + 1, *[num_seqs] * 4]
        self.packed = packed[: sum(self.widths)]
        self.parts = self.packed.split(self.widths)


class ChunkGraphs:
    """A recording for each of `sizes`, ascending. copies: as of `DecodeGraphs`.

    The runner must have its model, rows, KV cache and `logits` by then.
    """

    def __init__(
        self, runner: "ModelRunner", sizes: list[int], recorder: Recorder, copies: int = COPIES_IN_FLIGHT
    ) -> None:
        self.runner, self.sizes = runner, sizes
        device, num_seqs = runner.device, MAX_SEQUENCES
        length = 2 * (sizes[-1] if sizes else 0) + 6 * num_seqs + 1  # of the largest batch's numbers
        packed = torch.zeros(length, dtype=torch.int32, device=device)
        guesses = torch.zeros(num_seqs, dtype=torch.int64, device=device)
        self._host = host_buffers(length, copies, device)
        self.batches = {size: ChunkBatch(size, packed, guesses) for size in sizes}
        self._replays: dict[int, Callable[[], tuple[Tensor, Tensor]]] = {}
        for size in sizes[::-1]:  # the largest first, as in `DecodeGraphs`
            self._load(self.batches[size], [])
            self._replays[size] = recorder(lambda batch=self.batches[size]: self._step(batch))  # type: ignore[misc]

    def replay(self, scheduled: list[Scheduled]) -> Replayed | None:
        """Compute this work, if there is a recording that has room for it; else None, and nothing is done."""
        num_tokens = sum(s.num_tokens for s in scheduled)
        n = sum(len(s.guesses) + 1 for s in scheduled if s.sample)
        if not self.sizes or num_tokens > self.sizes[-1]:
            return None
        batch = self.batches[self.sizes[bisect_left(self.sizes, num_tokens)]]
        if max(n, len(scheduled) + 1) > len(batch.guesses):
            return None
        self._load(batch, scheduled)
        token_ids, logits = self._replays[batch.size]()
        *_, rows, positions = batch.parts
        return Replayed(rows[:n], positions[:n], token_ids[:n], logits[:n], batch.guesses[:n])

    def _load(self, batch: ChunkBatch, scheduled: list[Scheduled]) -> None:
        """Send a step's numbers to the device, in one copy."""
        missing = batch.size - sum(s.num_tokens for s in scheduled)
        scratch = self.runner.rows.scratch_row
        padding = [Scheduled(-1, scratch, 0, missing, sample=False, new_blocks=())] if missing else []
        host = next(self._host)[: len(batch.packed)]
        # A missing sequence begins behind the last token; a missing sample is one of the scratch row.
        fills = [0, 0, scratch, batch.size, 1, 0, scratch, 0]
        for part, place, fill in zip(pack([*scheduled, *padding]), host.split(batch.widths), fills, strict=True):
            array = place.numpy()
            array[: len(part)], array[len(part) :] = part, fill
        batch.packed.copy_(host, non_blocking=True)

    def _step(self, batch: ChunkBatch) -> tuple[Tensor, Tensor]:
        """From a step's numbers to its token ids [S] and logits [S, V]: what is recorded."""
        runner, rows = self.runner, self.runner.rows
        max_context_len = rows.token_ids.shape[1] - 1
        inputs = batch_of(batch.parts, rows, 0, batch.size, max_context_len)
        hidden = runner.model(inputs.input_ids, inputs.positions, runner.bind_attention(inputs.attention))  # [T, H]
        batch.guesses.copy_(rows.token_ids[inputs.sampled_rows, inputs.next_positions])
        logits = runner.model.logits(hidden[inputs.sampled_tokens], runner.logits[: len(batch.guesses)])  # [S, V]
        return runner.draw(logits, inputs.sampled_rows, inputs.next_positions), logits
