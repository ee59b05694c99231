"""Stage 3: paged blocks.

What hurt:    stage 2 reserves a rectangle as long as the longest sequence for every row, and computes padding too.
The idea:     cut KV memory into blocks of a few tokens, as an operating system cuts memory into pages. A sequence owns
              any blocks, in any order, through its block table: token p lives in slot
              block_table[p // block_size] * block_size + p % block_size. At most one partly filled block a sequence
              is wasted, and a batch is tokens laid end to end, without padding (Kwon et al., "PagedAttention", 2023).
Still hurts:  a hundred requests that open with the same long instructions compute and store them a hundred times. The
              block table would allow two sequences to own the same block. Stage 4 shares them.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.checkpoint import load_model
from stages.core import Events, OnEvent, SamplingParams, Sequence, append_token, make_sequences, sample
from stages.model import ModelConfig


class BlockPool:
    """Which blocks are free. It knows nothing of tensors: a block is a number."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}")
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.free_list = OrderedDict.fromkeys(range(num_blocks))  # a queue that can also lose a block from its middle

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Give `seq` the blocks for its first `num_tokens` tokens, or nothing at all and return False."""
        # exercise 3.1: how many blocks are missing from seq.block_table? If self.free_list has not as many, take none.
        #   Otherwise move them from the front of the free list (popitem(last=False)) to the table.
        missing = self.num_blocks_for(num_tokens) - len(seq.block_table)
        if missing > len(self.free_list):
            return False
        for _ in range(missing):
            block, _ = self.free_list.popitem(last=False)
            seq.block_table.append(block)
        return True
        # end exercise

    def release(self, seq: Sequence) -> list[int]:
        """Take all blocks back; returns those that are free now."""
        freed, seq.block_table = seq.block_table, []
        self.free_list.update(dict.fromkeys(freed))
        return freed


def check_fits(seq: Sequence, pool: BlockPool) -> None:
    """Refuse, before anything starts, what could not finish even with the whole pool to itself."""
    if pool.num_blocks_for(seq.max_slots) > pool.num_blocks:
        raise ValueError(
            f"prompts[{seq.request}]: {seq.num_prompt_tokens} prompt tokens + max_tokens {seq.params.max_tokens} need "
            f"{pool.num_blocks_for(seq.max_slots)} blocks of {pool.block_size}, the pool has {pool.num_blocks}; "
            f"raise num_blocks or lower max_tokens"
        )


@dataclass
class Rectangle:
    """Sequences with equally many new tokens, so that one call of attention serves them all."""

    tokens: Tensor  # [R, Q] where their queries stand among the T tokens of the batch
    context_slots: Tensor  # [R, C] the slots of all their keys, in order of position
    mask: Tensor  # [R, 1, Q, C] which keys each query sees


@dataclass
class Batch:
    """One step's work: the new tokens of some sequences laid end to end, and where their keys and values live."""

    input_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T] where each new token's key and value are written
    last_tokens: Tensor  # [S] the last token of each sequence among the T
    rectangles: list[Rectangle]
    # The same three facts in the form that kernels take them (see paged_attention_triton.py)
    block_tables: Tensor  # [S, M] int32
    query_start: Tensor  # [S + 1] int32
    context_lens: Tensor  # [S] int32


def slots_of(seq: Sequence, start: int, stop: int, block_size: int) -> list[int]:
    """The slots of tokens start..stop-1 of a sequence."""
    # exercise 3.2: which block holds each position, and at which offset? A slot is block * block_size + offset.
    positions = range(start, stop)
    blocks = [seq.block_table[position // block_size] for position in positions]
    return [block * block_size + position % block_size for block, position in zip(blocks, positions, strict=True)]
    # end exercise


def make_batch(work: SequenceOf[tuple[Sequence, int]], block_size: int, device: torch.device) -> Batch:
    """work: sequences, each with the number of tokens to compute beyond seq.num_computed (at least one)."""
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_start = [0]
    by_length: dict[int, list[int]] = {}
    for i, (seq, n) in enumerate(work):
        start, stop = seq.num_computed, seq.num_computed + n
        input_ids += seq.tokens[start:stop]
        positions += range(start, stop)
        slots += slots_of(seq, start, stop, block_size)
        query_start.append(query_start[-1] + n)
        by_length.setdefault(n, []).append(i)

    def tensor(data: object, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(data, device=device, dtype=dtype)

    context_lens = [seq.num_computed + n for seq, n in work]
    widest = max(len(seq.block_table) for seq, _ in work)
    rectangles = []
    for n, members in by_length.items():
        longest = max(context_lens[i] for i in members)
        context = [slots_of(work[i][0], 0, context_lens[i], block_size) for i in members]
        tokens = tensor([list(range(query_start[i], query_start[i] + n)) for i in members])  # [R, Q]
        last_key = tensor(positions)[tokens][:, None, :, None]  # [R, 1, Q, 1]
        # Short contexts are padded with slot 0, and never seen: the mask ends at the query's own position
        context_slots = tensor([c + [0] * (longest - len(c)) for c in context])
        rectangles.append(Rectangle(tokens, context_slots, torch.arange(longest, device=device) <= last_key))
    return Batch(
        tensor(input_ids),
        tensor(positions),
        tensor(slots),
        tensor(query_start[1:]) - 1,
        rectangles,
        tensor([seq.block_table + [0] * (widest - len(seq.block_table)) for seq, _ in work], torch.int32),
        tensor(query_start, torch.int32),
        tensor(context_lens, torch.int32),
    )


class PagedKVCache:
    """For each layer keys and values [num_blocks, block_size, Hkv, D]; the tokens of a block lie next to each other."""

    def __init__(self, c: ModelConfig, pool: BlockPool, device: torch.device, dtype: torch.dtype) -> None:
        shape = (c.num_hidden_layers, pool.num_blocks, pool.block_size, c.num_key_value_heads, c.head_dim)
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)

    def write(self, batch: Batch, layer: int, k: Tensor, v: Tensor) -> None:
        """Put k and v [T, Hkv, D] into the slots of the batch."""
        self.k[layer].flatten(0, 1)[batch.slots] = k
        self.v[layer].flatten(0, 1)[batch.slots] = v

    def attend(self, batch: Batch, layer: int, q: Tensor) -> Tensor:
        """Attention by gather: copy each sequence's keys and values into one piece, then attend as before.

        q [T, Hq, D] -> [T, Hq, D]. The copy is what a real kernel avoids: paged_attention_triton.py reads in place.
        """
        out = torch.empty_like(q)
        for r in batch.rectangles:
            # exercise 3.3: gather k and v [R, C, Hkv, D] by r.context_slots from the flat view of this layer's cache;
            #   attention of q[r.tokens] [R, Q, Hq, D] with r.mask, heads before tokens; back into out[r.tokens].
            k = self.k[layer].flatten(0, 1)[r.context_slots].transpose(1, 2)  # [R, Hkv, C, D]
            v = self.v[layer].flatten(0, 1)[r.context_slots].transpose(1, 2)
            queries = q[r.tokens].transpose(1, 2)  # [R, Hq, Q, D]
            result = F.scaled_dot_product_attention(queries, k, v, attn_mask=r.mask, enable_gqa=True)
            out[r.tokens] = result.transpose(1, 2)
            # end exercise
        return out

    def attend_triton(self, batch: Batch, layer: int, q: Tensor) -> Tensor:
        """The same by the kernel, which follows the block table instead of copying."""
        from stages.paged_attention_triton import paged_attention  # Linux only, so imported where it is used

        tables, starts, lens = batch.block_tables, batch.query_start, batch.context_lens
        return paged_attention(q, self.k[layer], self.v[layer], tables, starts, lens, q.shape[-1] ** -0.5)


class PagedEngine:
    """Static batches again, but of as many sequences as their blocks allow, and without a padded token."""

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
        attention: Literal["gather", "triton"] = "gather",
    ) -> None:
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
        if attention not in ("gather", "triton"):
            raise ValueError(f"attention must be 'gather' or 'triton', got {attention!r}")
        loaded = load_model(model, device=device, dtype=dtype)
        self.model, self.config = loaded.model, loaded.config
        self.eos_token_ids = loaded.eos_token_ids
        self.vocab_size = loaded.config.vocab_size
        self.device = torch.device(device)
        self.max_num_seqs = max_num_seqs
        self.pool = self.make_pool(num_blocks, block_size)
        self.cache = PagedKVCache(self.config, self.pool, self.device, next(loaded.model.parameters()).dtype)
        self.paged_attention = self.cache.attend if attention == "gather" else self.cache.attend_triton
        self.events = Events(on_event)

    def make_pool(self, num_blocks: int, block_size: int) -> BlockPool:
        return BlockPool(num_blocks, block_size)

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
        """Token ids in, generated token ids out. Raises ValueError for a request that makes no sense or cannot fit."""
        sequences = make_sequences(
            prompts, params, vocab_size=self.vocab_size, max_model_len=self.config.max_position_embeddings
        )
        for seq in sequences:
            check_fits(seq, self.pool)
        for seq in sequences:
            self.events.emit("added", seq.request, prompt_tokens=seq.num_prompt_tokens)
        waiting = deque(sequences)
        try:
            while waiting:
                self.finish_batch(self.start_batch(waiting))
        finally:  # also when interrupted: the pool outlives this call
            for seq in sequences:
                self.release(seq)
        return [seq.output for seq in sequences]

    def start_batch(self, waiting: deque[Sequence]) -> list[Sequence]:
        """Admit as many as have room to the end, and prefill them all in one step. Returns those that go on."""
        batch: list[Sequence] = []
        while waiting and len(batch) < self.max_num_seqs and self.admit(waiting[0]):
            batch.append(waiting.popleft())
        logits = self.step([(seq, seq.num_prompt_tokens) for seq in batch])
        return self.append_sampled(batch, logits)

    def finish_batch(self, running: list[Sequence]) -> None:
        """Decode until the last one is over. Those that finish leave the step, but nobody takes their place."""
        while running:
            logits = self.step([(seq, 1) for seq in running])
            running = self.append_sampled(running, logits)

    def admit(self, seq: Sequence) -> bool:
        """Reserve every block the sequence may ever need, so that it can never run dry."""
        if not self.pool.allocate(seq, seq.max_slots):
            return False
        shared = seq.num_computed // self.pool.block_size  # none before stage 4
        self.events.emit("admitted", seq.request, cached=seq.num_computed)
        table = seq.block_table
        self.events.emit("blocks", seq.request, taken=table[shared:], shared=table[:shared], freed=[])
        return True

    def step(self, work: list[tuple[Sequence, int]]) -> Tensor:
        """Compute the next `n` tokens of each sequence -> logits [S, V] of each one's last token."""
        self.events.step += 1
        for seq, n in work:
            self.events.emit("scheduled", seq.request, tokens=n, cached=seq.num_computed)
        batch = make_batch(work, self.pool.block_size, self.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache.write(batch, layer, k, v)  # first: a token sees itself, too
            return self.paged_attention(batch, layer, q)

        hidden = self.model(batch.input_ids, batch.positions, attend)  # [T, H]
        for seq, n in work:
            seq.num_computed += n
        return self.model.logits(hidden[batch.last_tokens])

    def append_sampled(self, batch: list[Sequence], logits: Tensor) -> list[Sequence]:
        """Sample one token for each sequence; those that are over give their blocks back, the others are returned."""
        going_on = []
        for seq, token in zip(batch, sample(logits, batch), strict=True):
            if append_token(seq, token, self.eos_token_ids, self.events):
                self.release(seq)
            else:
                going_on.append(seq)
        return going_on

    def release(self, seq: Sequence) -> None:
        if seq.block_table:
            self.events.emit("blocks", seq.request, taken=[], shared=[], freed=self.pool.release(seq))
