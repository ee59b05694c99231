"""Stage 6: CUDA graphs.

What hurt:    a decode step is hundreds of small kernels, and Python launches them one by one. On a GPU that takes
              longer than running them: the GPU waits for the CPU.
The idea:     from step to step the launches are the same, only the data differ. So record them once for each of a few
              batch sizes (*buckets*), with inputs and outputs at addresses that never change; then a step is: copy the
              inputs in, replay the recording with a single call, copy the tokens out. A batch is padded to the next
              bucket with rows that work in a *scratch block*. Whatever the CPU did in mid-step has to move: lengths
              are read by the kernels, and sampling happens on the device.
Still hurts:  the kernels are launched for free now, but they are as many and as small as before (torch.compile can
              fuse some of them). And one device still holds the whole model: stage 7 splits it.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from stages.core import OnEvent, Sequence, gumbel
from stages.stage_3_paged_blocks import Attention, Batch, PagedKVCache, Rectangle, gather_attention, slots_of
from stages.stage_5_continuous_batching import ContinuousBatchingEngine, Scheduled


def bucket_ladder(max_num_seqs: int) -> list[int]:
    """The batch sizes that are recorded: 1, 2, 4, 8, then every multiple of 8, and the largest batch there can be.

    A size of its own for each batch would take memory and time for each; powers of two would pad up to half of it.
    """
    # exercise 6.1: the sizes below max_num_seqs in ascending order, and max_num_seqs itself as the last.
    small = [1, 2, 4]
    multiples = range(8, max_num_seqs, 8)
    below = [size for size in (*small, *multiples) if size < max_num_seqs]
    return [*below, max_num_seqs]
    # end exercise


class Graph(Protocol):
    """A recorded function without arguments: what it reads and writes lies at fixed addresses."""

    def replay(self) -> Tensor: ...


class EagerGraph:
    """Takes the place of a CUDA graph where there is no GPU: it calls the function again, which saves nothing."""

    def __init__(self, function: Callable[[], Tensor]) -> None:
        self.replay = function


class CUDAGraph:
    """A recording of the kernels that `function` launches. The GPU runs all of them after a single call.

    `pool` is the memory that all graphs share: no two of them run at the same time. Captured from the largest to the
    smallest, they need hardly more of it than the largest alone.
    """

    def __init__(self, function: Callable[[], Tensor], pool: Any) -> None:
        # Once for real, on a side stream: kernels are compiled and libraries set up by it, which a capture forbids
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):  # nothing runs in here: launches are only written down
            self.output = function()

    def replay(self) -> Tensor:
        """Run it on whatever the inputs hold now. The next replay, of any graph, overwrites the result."""
        self.graph.replay()
        return self.output


@dataclass
class Rows:
    """The input of a decode step of `b` rows: one row per sequence, eight bytes per number."""

    input_ids: Tensor  # [b]
    positions: Tensor  # [b]
    slots: Tensor  # [b] where the new key and value are written
    context_lens: Tensor  # [b]
    temperatures: Tensor  # [b] float64
    block_tables: Tensor  # [b, M]

    @classmethod
    def of(cls, memory: Tensor, bucket: int) -> "Rows":
        """memory [b * (5 + M)] int64, laid out as the fields above: views of it, so that one copy brings all."""
        fields, tables = memory[: 5 * bucket].view(5, bucket), memory[5 * bucket :].view(bucket, -1)
        return cls(fields[0], fields[1], fields[2], fields[3], fields[4].view(torch.float64), tables)

    def fill(self, batch: list[Sequence], block_size: int, scratch_block: int) -> None:
        """Describe the newest token of each sequence. What an earlier, larger batch left here must not survive."""
        padding = len(self.input_ids) - len(batch)
        # exercise 6.2: copy_(torch.tensor(...)) into the five fields [b]: sequences first, then `padding` rows. Those
        #   are harmless sequences of one token: id 0 at position 0, temperature 0, which write to the first slot of the
        #   scratch block and see that one key.
        newest = [len(seq.token_ids) - 1 for seq in batch]
        slots = [slots_of(seq, n, n + 1, block_size)[0] for seq, n in zip(batch, newest, strict=True)]
        self.input_ids.copy_(torch.tensor([seq.token_ids[-1] for seq in batch] + [0] * padding))
        self.positions.copy_(torch.tensor(newest + [0] * padding))
        self.slots.copy_(torch.tensor(slots + [scratch_block * block_size] * padding))
        self.context_lens.copy_(torch.tensor([n + 1 for n in newest] + [1] * padding))
        self.temperatures.copy_(
            torch.tensor([seq.params.temperature for seq in batch] + [0] * padding, dtype=torch.float64)
        )
        # end exercise
        self.block_tables.fill_(scratch_block)
        tables = self.block_tables.numpy()  # a list goes into it without becoming a tensor first
        for row, seq in enumerate(batch):
            tables[row, : len(seq.block_table)] = seq.block_table


class CUDAGraphEngine(ContinuousBatchingEngine):
    """Stage 5, with steps in which everybody decodes replayed from a recording. All others run as before.

    attention: "auto" is the Triton kernel on a GPU where it can take the shapes, and the gather everywhere else.
    """

    def __init__(
        self,
        model: str,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        on_event: OnEvent | None = None,
        block_size: int = 16,
        num_blocks: int = 512,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        attention: Literal["auto", "gather", "triton"] = "auto",
    ) -> None:
        super().__init__(
            model, device=device, dtype=dtype, on_event=on_event, block_size=block_size, num_blocks=num_blocks,
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
            attention="gather" if attention == "auto" else attention,
        )  # fmt: skip
        fits = self.config.head_dim in (64, 128) and block_size >= 16 and block_size & (block_size - 1) == 0
        if attention == "auto" and self.device.type == "cuda" and fits:
            self.attention = "triton"  # for prefill, too
        # A cache of one block more than the pool knows of. Nobody is ever given that one: padding may scribble in it
        self.scratch_block = num_blocks
        self.cache = PagedKVCache(self.config, num_blocks + 1, block_size, self.device)
        # The longest table that there can be: every shape must be known when the step is recorded
        self.table_width = min(self.pool.num_blocks_for(self.config.max_position_embeddings), num_blocks)
        self.buckets = bucket_ladder(max_num_seqs)
        size = max_num_seqs * (5 + self.table_width)
        self.host_memory = torch.zeros(size, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self.device_memory = torch.zeros(size, dtype=torch.int64, device=self.device)
        self.noise = torch.zeros(max_num_seqs, self.config.vocab_size, dtype=torch.float64, device=self.device)
        self.recorded_model = self.model
        self.graphs = self.record()

    @torch.inference_mode()
    def record(self) -> dict[int, Graph]:
        """A graph for every bucket. `graph_bytes` is then what all of them together take on the device."""
        self.graph_bytes = 0
        if self.device.type != "cuda":
            return {bucket: EagerGraph(partial(self.decode_step, bucket)) for bucket in self.buckets}
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        memory = torch.cuda.graph_pool_handle()
        graphs: dict[int, Graph] = {}
        with tqdm(reversed(self.buckets), "Recording decode steps", len(self.buckets), unit="batch size") as progress:
            for bucket in progress:
                graphs[bucket] = CUDAGraph(partial(self.decode_step, bucket), memory)
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                self.graph_bytes = free - torch.cuda.mem_get_info(self.device)[0]
                progress.set_postfix_str(f"{self.graph_bytes / 2**20:.0f} MiB")
        return graphs

    def memory_of(self, memory: Tensor, bucket: int) -> Tensor:
        """The part of it that a bucket uses: the beginning, so that all of them share it."""
        return memory[: bucket * (5 + self.table_width)]

    def decode_step(self, bucket: int) -> Tensor:
        """What is recorded: from the input memory to the next token of each row, [b] int64.

        Shapes follow from the bucket alone, values are read on the device: no `if` and no `int()` of a tensor in here.
        """
        rows = Rows.of(self.memory_of(self.device_memory, bucket), bucket)
        numbers = torch.arange(bucket, device=self.device)  # [b]
        batch = Batch(rows.input_ids, rows.positions, rows.slots, numbers, self.attention_of(rows, numbers))
        hidden = self.model(rows.input_ids, rows.positions, partial(self.cache.attend, batch))  # [b, H]
        logits = self.model.logits(hidden)  # [b, V]
        # exercise 6.3: the rule of `stages.core.sample` for all rows at once: logits + temperature * self.noise (drawn
        #   already; the first `bucket` rows are this batch's), and the index of the largest sum in each row.
        noise = self.noise[:bucket]  # [b, V]
        scores = logits + rows.temperatures[:, None] * noise
        return scores.argmax(dim=-1)
        # end exercise

    def attention_of(self, rows: Rows, numbers: Tensor) -> Attention:
        """What attends in the recorded step: the gather or the kernel, reading tables and lengths on the device."""
        if self.attention == "gather":
            return partial(gather_attention, [self.whole_tables(rows, numbers)])
        from stages.paged_attention_triton import paged_decode_attention  # Linux only

        tables, lens = rows.block_tables.int(), rows.context_lens.int()
        return partial(paged_decode_attention, block_table=tables, context_len=lens)

    def whole_tables(self, rows: Rows, numbers: Tensor) -> Rectangle:
        """Stage 3's gather, of as many keys as there can be instead of as many as there are; the rest is masked."""
        # exercise 6.4: context_slots [b, C] of all blocks in rows.block_tables [b, M], C = M * block_size; a mask
        #   [b, 1, 1, C] by which a row sees its first rows.context_lens slots; tokens [b, 1]: row i has token i. A slot
        #   that is not seen may hold a NaN of somebody else: the row's own first slot takes its place.
        offsets = torch.arange(self.pool.block_size, device=self.device)
        context_slots = (rows.block_tables[:, :, None] * self.pool.block_size + offsets).flatten(1)
        columns = torch.arange(context_slots.shape[1], device=self.device)
        seen = columns < rows.context_lens[:, None]  # [b, C]
        context_slots = torch.where(seen, context_slots, context_slots[:, :1])
        return Rectangle(numbers[:, None], context_slots, seen[:, None, None])
        # end exercise

    def run(self, plan: list[Scheduled]) -> list[int]:
        """One replay if a recording has room for the plan, and stage 5's run if none has."""
        bucket = self.bucket_for(plan)
        return self.replay(bucket, [s.seq for s in plan]) if bucket else super().run(plan)

    def bucket_for(self, plan: list[Scheduled]) -> int | None:
        """The smallest recorded batch size with room for the plan; None if it is not a mere decode step.

        A CUDA graph holds the kernels of one model. If somebody exchanges `self.model`, only eager steps obey.
        """
        decode = all(s.num_tokens == 1 and s.sample for s in plan) and 0 < len(plan) <= self.buckets[-1]
        if not decode or (self.device.type == "cuda" and self.model is not self.recorded_model):
            return None
        return self.buckets[bisect_left(self.buckets, len(plan))]

    def replay(self, bucket: int, batch: list[Sequence]) -> list[int]:
        """Copy in, replay, copy out -> the next token of each sequence."""
        host = self.memory_of(self.host_memory, bucket)
        Rows.of(host, bucket).fill(batch, self.pool.block_size, self.scratch_block)
        self.memory_of(self.device_memory, bucket).copy_(host, non_blocking=True)
        for row, seq in enumerate(batch):
            if seq.params.temperature > 0:  # greedy rows multiply whatever noise lies there by 0
                self.noise[row].copy_(gumbel(seq, self.config.vocab_size))
        # tolist() waits for the device, so nobody writes to host_memory while it is still being read
        return self.graphs[bucket].replay()[: len(batch)].tolist()
