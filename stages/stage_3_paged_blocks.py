"""Stage 3: paged blocks.

What hurt:    stage 2 reserves a rectangle as long as the longest sequence for every row, and computes padding too.
The idea:     cut KV memory into blocks of a few slots, one slot per token, as an operating system cuts memory into
              pages. A sequence owns any blocks; its block table lists them in the order of its text, and slots are
              counted through all blocks of the pool. At most one partly filled block a sequence is wasted, and a
              batch is tokens laid end to end, without padding (Kwon et al., "PagedAttention", 2023).
Still hurts:  a hundred requests that open with the same long instructions compute and store them a hundred times. The
              block table would allow two sequences to own the same block. Stage 4 shares them.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.checkpoint import load_model
from stages.core import OnEvent, SamplingParams, Sequence, Trace, accept, append_token, check_options, sample
from stages.model import ModelConfig


class BlockPool:
    """Which blocks are free. It knows nothing of tensors: a block is a number."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
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

    def check_fits(self, seq: Sequence) -> None:
        """Raise ValueError for a sequence that could not finish even with the whole pool to itself."""
        needed = self.num_blocks_for(seq.max_slots)
        if needed > self.num_blocks:
            raise ValueError(
                f"prompts[{seq.request}]: {seq.num_prompt_tokens} prompt tokens + max_tokens {seq.params.max_tokens} "
                f"need {needed} blocks of {self.block_size}, the pool has {self.num_blocks}; "
                f"raise num_blocks or lower max_tokens"
            )


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [T, Hq, D] and a layer's blocks of K and V -> [T, Hq, D]


@dataclass
class Batch:
    """The work of one step: new tokens of some sequences laid end to end, and where their keys and values live."""

    input_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T] where each new token's key and value are written
    last_tokens: Tensor  # [S] the last token of each sequence among the T
    attention: Attention  # in which the tokens' queries meet the keys and values of their sequences


def slots_of(seq: Sequence, start: int, stop: int, block_size: int) -> list[int]:
    """The slots of tokens start..stop-1 of a sequence."""
    # exercise 3.2: which block holds each position, and at which offset? A slot is block * block_size + offset.
    positions = range(start, stop)
    blocks = [seq.block_table[position // block_size] for position in positions]
    return [block * block_size + position % block_size for block, position in zip(blocks, positions, strict=True)]
    # end exercise


Work = SequenceOf[tuple[Sequence, int]]  # sequences, each with how many tokens to compute beyond its num_computed


def make_batch(work: Work, block_size: int, device: torch.device, attention: str = "gather") -> Batch:
    """The batch of a step that computes at least one token of each sequence in `work`."""
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    last_tokens: list[int] = []
    for seq, n in work:
        start, stop = seq.num_computed, seq.num_computed + n
        input_ids += seq.token_ids[start:stop]
        positions += range(start, stop)
        slots += slots_of(seq, start, stop, block_size)
        last_tokens.append(len(input_ids) - 1)
    attend: Attention
    if attention == "triton":
        from stages.paged_attention_triton import attend_in_place  # Linux only, so imported where it is used

        attend = attend_in_place(work, device)
    else:
        attend = partial(gather_attention, make_rectangles(work, block_size, device))
    tokens = torch.tensor([input_ids, positions, slots], device=device)  # [3, T]
    return Batch(tokens[0], tokens[1], tokens[2], torch.tensor(last_tokens, device=device), attend)


@dataclass
class Rectangle:
    """Sequences with equally many new tokens, so that one call of attention serves them all."""

    tokens: Tensor  # [R, Q] where their queries stand among the T tokens of the batch
    context_slots: Tensor  # [R, C] the slots of all their keys, in order of position
    mask: Tensor  # [R, 1, Q, C] which keys each query sees


def make_rectangles(work: Work, block_size: int, device: torch.device) -> list[Rectangle]:
    """The sequences of a step sorted into rectangles."""
    by_length: dict[int, list[tuple[Sequence, int]]] = {}  # new tokens -> sequences, and where their tokens begin
    first = 0
    for seq, n in work:
        by_length.setdefault(n, []).append((seq, first))
        first += n
    rectangles = []
    for n, members in by_length.items():
        starts = torch.tensor([seq.num_computed for seq, _ in members], device=device)
        firsts = torch.tensor([first for _, first in members], device=device)
        context = [slots_of(seq, 0, seq.num_computed + n, block_size) for seq, _ in members]
        longest = max(map(len, context))
        # Short contexts are padded with their own first slot, and the mask hides it. Another's slot may hold a NaN, and
        # no mask stops that: its probability is 0, but 0 * NaN is NaN.
        context_slots = torch.tensor([c + c[:1] * (longest - len(c)) for c in context], device=device)
        queries = torch.arange(n, device=device)
        last_key = (starts[:, None] + queries)[:, None, :, None]  # [R, 1, Q, 1]
        mask = torch.arange(longest, device=device) <= last_key
        rectangles.append(Rectangle(firsts[:, None] + queries, context_slots, mask))
    return rectangles


def gather_attention(rectangles: list[Rectangle], q: Tensor, k_blocks: Tensor, v_blocks: Tensor) -> Tensor:
    """Attention by gather: copy each sequence's keys and values into one piece, then attend as before.

    q [T, Hq, D], blocks [num_blocks, block_size, Hkv, D] -> [T, Hq, D]. The copy is what a real kernel avoids:
    paged_attention_triton.py reads in place.
    """
    out = torch.empty_like(q)
    for r in rectangles:
        # exercise 3.3: gather k and v [R, C, Hkv, D] by r.context_slots from the flat view of the blocks, which has a
        #   row for each slot; attention of q[r.tokens] [R, Q, Hq, D] with r.mask, heads before tokens; back into
        #   out[r.tokens].
        k = k_blocks.flatten(0, 1)[r.context_slots].transpose(1, 2)  # [R, Hkv, C, D]
        v = v_blocks.flatten(0, 1)[r.context_slots].transpose(1, 2)
        queries = q[r.tokens].transpose(1, 2)  # [R, Hq, Q, D]
        result = F.scaled_dot_product_attention(queries, k, v, attn_mask=r.mask, enable_gqa=True)
        out[r.tokens] = result.transpose(1, 2)
        # end exercise
    return out


class PagedKVCache:
    """For each layer keys and values [num_blocks, block_size, Hkv, D]; the tokens of a block lie next to each other."""

    def __init__(self, c: ModelConfig, num_blocks: int, block_size: int, device: torch.device) -> None:
        shape = (c.num_hidden_layers, num_blocks, block_size, c.num_key_value_heads, c.head_dim)
        self.k = torch.zeros(shape, device=device, dtype=c.dtype)
        self.v = torch.zeros(shape, device=device, dtype=c.dtype)

    def attend(self, batch: Batch, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Put the new keys and values [T, Hkv, D] into their slots, then attend: q [T, Hq, D] -> [T, Hq, D]."""
        self.k[layer].flatten(0, 1)[batch.slots] = k  # first: a token sees itself, too
        self.v[layer].flatten(0, 1)[batch.slots] = v
        return batch.attention(q, self.k[layer], self.v[layer])


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
        check_options(block_size=block_size, num_blocks=num_blocks, max_num_seqs=max_num_seqs, attention=attention)
        self.model, self.config, self.eos_token_ids, _ = load_model(model, device=device, dtype=dtype)
        self.device, self.trace = torch.device(device), Trace(on_event)
        self.max_num_seqs, self.attention = max_num_seqs, attention
        self.pool = self.make_pool(num_blocks, block_size)
        self.cache = PagedKVCache(self.config, num_blocks, block_size, self.device)

    def make_pool(self, num_blocks: int, block_size: int) -> BlockPool:
        return BlockPool(num_blocks, block_size)

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
        """Token ids in, generated token ids out. Raises ValueError for a request that makes no sense or cannot fit."""
        sequences = accept(prompts, params, self.config, self.trace, self.pool.check_fits)
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
        self.trace.emit("admitted", seq.request, cached=seq.num_computed)
        table = seq.block_table
        self.trace.emit("blocks", seq.request, taken=table[shared:], shared=table[:shared], freed=[])
        return True

    def step(self, work: list[tuple[Sequence, int]]) -> Tensor:
        """Compute the next `n` tokens of each sequence -> logits [S, V] of each one's last token."""
        self.trace.step += 1
        for seq, n in work:
            self.trace.emit("scheduled", seq.request, tokens=n, cached=seq.num_computed)
        batch = make_batch(work, self.pool.block_size, self.device, self.attention)
        hidden = self.model(batch.input_ids, batch.positions, partial(self.cache.attend, batch))  # [T, H]
        for seq, n in work:
            seq.num_computed += n
        return self.model.logits(hidden[batch.last_tokens])

    def append_sampled(self, batch: list[Sequence], logits: Tensor) -> list[Sequence]:
        """Sample one token for each sequence; those that are over give their blocks back, the others are returned."""
        going_on = []
        for seq, token in zip(batch, sample(logits, batch), strict=True):
            if append_token(seq, token, self.eos_token_ids, self.trace):
                self.release(seq)
            else:
                going_on.append(seq)
        return going_on

    def release(self, seq: Sequence) -> None:
        if seq.block_table:
            self.trace.emit("blocks", seq.request, taken=[], shared=[], freed=self.pool.release(seq))
