"""Elective: sliding windows.

What hurts:   each layer keeps the keys and values of a text until its request ends, and every new token reads them all.
The idea:     a layer need not look back to the beginning (Beltagy et al., "Longformer", 2020; Jiang et al., "Mistral
              7B", 2023). Its queries see the last `window` keys, their own included. So a block that lies before the
              window is given back while its request runs. Most models mix such layers with some that see all, whose
              blocks must stay. So each kind of layer gets a pool of blocks, and block tables of its own. And a cached
              beginning can be used if the blocks that a window still sees are there.
Still hurts:  layers that see all keep everything. The pools have fixed sizes, and lend each other no memory. And gather
              computes scores for keys that the mask then hides; a kernel skips them (nanovllm/kernels/attention).
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from stages.checkpoint import MODEL_TYPES, load_model, read_json
from stages.core import OnEvent, Sequence, Trace, check_options, sample
from stages.stage_3_paged_blocks import Batch, BlockPool, PagedKVCache, Rectangle, gather_attention
from stages.stage_5_continuous_batching import ContinuousBatchingEngine, Scheduled, Scheduler


def read_windows(path: Path) -> tuple[int, ...]:
    """For each layer how many keys a query sees, its own included; 0: all.

    Raises ValueError if config.json says that a layer has a window but not how large it is, or if layer_types has not
    one entry for each layer.
    """
    raw = read_json(path / "config.json")
    layers, is_mistral = raw["num_hidden_layers"], raw["model_type"] == "mistral"
    is_used = is_mistral or (raw.get("use_sliding_window") and raw["model_type"] != "llama")
    window = int((is_used and raw.get("sliding_window", 4096)) or 0)
    limited = [window > 0 and (is_mistral or layer >= raw.get("max_window_layers", 28)) for layer in range(layers)]
    if raw.get("layer_types"):
        limited = [kind == "sliding_attention" for kind in raw["layer_types"]]
    if len(limited) != layers or (any(limited) and window < 1):
        raise ValueError(f"{path}: config.json has {layers} layers, sliding_window {window}, layer_types {limited}")
    return tuple(window if has_window else 0 for has_window in limited)


def oldest_key(num_computed: int, window: int) -> int:
    """The first position that is seen by the query at position `num_computed`, or by any after it."""
    return max(0, num_computed + 1 - window) if window else 0


def see(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """Which keys each query sees. Positions [..., Q, 1] and [..., 1, C] -> bool [..., Q, C]; window 0: no limit."""
    # exercise windows.1: a query sees no later key than its own, and in a window `window` keys at most, with its own.
    mask = keys <= queries
    if window:
        mask &= keys > queries - window
    return mask
    # end exercise


@dataclass(frozen=True, eq=False)
class Beginning:
    """A text up to the end of a block: the name of that block. Equal texts have one object, so no digest is needed."""

    parent: "Beginning | None"  # without its last block
    token_ids: tuple[int, ...]  # in its last block


class WindowPool(BlockPool):
    """The blocks of all layers with one window. A table says where block i of a text lies, for blocks still seen."""

    def __init__(self, num_blocks: int, block_size: int, window: int, first: int) -> None:
        super().__init__(num_blocks, block_size)
        self.window, self.first = window, first  # first: what events call the first block of this pool
        self.tables: dict[Sequence, dict[int, int]] = {}
        self.ref_counts = [0] * num_blocks
        self.names: list[Beginning | None] = [None] * num_blocks  # of full, computed blocks
        self.block_of: dict[Beginning, int] = {}  # one for each name

    def needed(self, num_computed: int, num_tokens: int) -> range:
        """The blocks of the first `num_tokens` tokens that must be there when `num_computed` of them are computed."""
        # exercise windows.2: the next query stands at `num_computed`. From the block with the oldest key that it sees
        #   (oldest_key) on, all are needed: num_blocks_for knows where they end.
        first = oldest_key(num_computed, self.window) // self.block_size
        stop = self.num_blocks_for(num_tokens)
        return range(first, stop)
        # end exercise

    def has_room(self, seq: Sequence, places: range, shared: dict[int, int]) -> bool:
        missing = len(places) - len(shared) - len(self.tables.get(seq, ()))
        return missing <= len(self.free_list) - sum(self.ref_counts[block] == 0 for block in shared.values())

    def take(self, seq: Sequence, places: range, shared: dict[int, int]) -> list[int]:
        """Complete the table of `seq`: the shared blocks first, then free ones, which are returned. There is room."""
        table = self.tables.setdefault(seq, {})
        for block in shared.values():
            self.free_list.pop(block, None)
        fresh = {i: self.free_list.popitem(last=False)[0] for i in places if i not in table | shared}
        for block in fresh.values():  # about to be filled again: nobody may find what it holds any more
            if (name := self.names[block]) is not None and self.block_of.get(name) == block:
                del self.block_of[name]
            self.names[block] = None
        for block in [*shared.values(), *fresh.values()]:
            self.ref_counts[block] += 1
        table |= shared | fresh
        return list(fresh.values())

    def give_back(self, seq: Sequence, stop: int) -> list[int]:
        """Take the blocks before block `stop` of the text out of the table; returns those that are free now."""
        table, freed = self.tables[seq], []
        for i in sorted((i for i in table if i < stop), reverse=True):
            block = table.pop(i)
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free_list[block] = None  # what it holds can be found until it is taken again
                freed.append(self.first + block)
        return freed


class Pools:
    """The pools of all kinds of layers. To the scheduler they are one pool. Events number the blocks of all pools."""

    def __init__(self, pools: list[WindowPool], chunk: int, trace: Trace) -> None:
        self.pools, self.block_size = pools, pools[0].block_size
        self.chunk, self.trace = chunk, trace  # chunk: tokens that a step computes at most
        self.nothing: list[dict[int, int]] = [{} for _ in pools]  # shared blocks of a text that shares none
        self.known = WeakValueDictionary[tuple[Beginning | None, tuple[int, ...]], Beginning]()

    def check_fits(self, seq: Sequence) -> None:
        for pool in self.pools:
            most = pool.num_blocks_for(seq.max_slots)
            if pool.window:  # what a chunk sees may begin with the last token of a block
                most = min(most, (pool.window - 1 + self.chunk - 2) // self.block_size + 2)
            if most > pool.num_blocks:
                raise ValueError(
                    f"prompts[{seq.request}]: {seq.max_slots} tokens need up to {most} blocks of {self.block_size} in "
                    f"layers with window {pool.window}, which have {pool.num_blocks}; raise "
                    f"{'num_window_blocks' if pool.window else 'num_blocks'} or lower max_tokens"
                )

    def beginnings(self, seq: Sequence, num_blocks: int) -> list[Beginning]:
        """The first `num_blocks` beginnings of a text, from the shortest to the longest."""
        found: list[Beginning] = []
        for start in range(0, num_blocks * self.block_size, self.block_size):
            key = found[-1] if found else None, tuple(seq.token_ids[start : start + self.block_size])
            found.append(self.known.get(key) or Beginning(*key))
            self.known[key] = found[-1]
        return found

    def find_beginning(self, names: list[Beginning]) -> tuple[int, list[dict[int, int]]]:
        """How many of the first blocks of a text need not be computed, and which blocks that takes from each pool."""
        found = [{i: p.block_of[name] for i, name in enumerate(names) if name in p.block_of} for p in self.pools]
        for count in range(len(names), 0, -1):
            # exercise windows.3: which blocks does each pool need when `count` blocks are computed? If it has them all,
            #   return count, and for each pool a dict like that in `found`, of the blocks that it needs.
            n = count * self.block_size
            needed = [pool.needed(n, n) for pool in self.pools]
            if all(i in blocks for blocks, places in zip(found, needed, strict=True) for i in places):
                return count, [{i: blocks[i] for i in places} for blocks, places in zip(found, needed, strict=True)]
            # end exercise
        return 0, self.nothing

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Give `seq` blocks for its first `num_tokens` tokens, known ones first; or nothing, and return False."""
        start, shared = seq.num_computed, self.nothing
        if not seq.block_table:
            count, shared = self.find_beginning(self.beginnings(seq, (len(seq.token_ids) - 1) // self.block_size))
            start = count * self.block_size
        wants = []
        for pool, blocks in zip(self.pools, shared, strict=True):
            # No more blocks than one step can fill: before the next step some are given back
            stop = min(num_tokens, start + self.chunk) if pool.window else num_tokens
            wants.append((pool, pool.needed(start, stop), blocks))
        if not all(pool.has_room(seq, places, blocks) for pool, places, blocks in wants):
            return False
        taken = [pool.first + b for pool, places, blocks in wants for b in pool.take(seq, places, blocks)]
        found = [pool.first + b for pool, _, blocks in wants for b in blocks.values()]
        if taken or found:
            self.trace.emit("blocks", seq.request, taken=taken, shared=found, freed=[])
        seq.num_computed = start
        seq.block_table += found + taken  # of all kinds, in no order: for the scheduler it need not be empty
        return True

    def publish(self, seq: Sequence) -> None:
        """Make those blocks of `seq` findable that are full and computed."""
        names = self.beginnings(seq, seq.num_computed // self.block_size)
        for pool in self.pools:
            for i, block in pool.tables[seq].items():
                if i < len(names) and pool.names[block] is None:
                    pool.names[block] = names[i]
                    pool.block_of.setdefault(names[i], block)

    def release_unseen(self, seq: Sequence) -> None:
        """Give back the blocks that no later query of `seq` sees."""
        freed = [b for p in self.pools for b in p.give_back(seq, p.needed(seq.num_computed, seq.num_computed).start)]
        if freed:
            self.trace.emit("blocks", seq.request, taken=[], shared=[], freed=freed)

    def release(self, seq: Sequence) -> list[int]:
        freed = [b for pool in self.pools for b in pool.give_back(seq, len(seq.token_ids))]
        for pool in self.pools:
            del pool.tables[seq]
        seq.block_table = []
        return freed


class WindowScheduler(Scheduler):
    """Stage 5's, with blocks that are given back as the windows move on."""

    blocks: Any  # Pools, of which the scheduler asks no more than of stage 4's pool

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        return bool(self.blocks.allocate(seq, num_tokens))

    def commit(self, plan: list[Scheduled], token_ids: list[int], eos_token_ids: frozenset[int]) -> None:
        super().commit(plan, token_ids, eos_token_ids)
        for s in plan:
            if s.seq in self.running:
                self.blocks.release_unseen(s.seq)


def make_window_batch(plan: list[Scheduled], pool: WindowPool, device: torch.device) -> Batch:
    """Stage 3's batch for one kind of layers, with a rectangle for each sequence. It has only keys that a new query of
    the sequence sees: the blocks of older keys may belong to another sequence by now."""
    tokens: list[tuple[int, int, int]] = []  # of each that is computed its id, position and slot
    last_tokens: list[int] = []
    rectangles: list[Rectangle] = []
    for s in plan:
        table, start, stop = pool.tables[s.seq], s.seq.num_computed, s.seq.num_computed + s.num_tokens
        keys, size = range(oldest_key(start, pool.window), stop), pool.block_size
        slots = [table[position // size] * size + position % size for position in keys]
        new = torch.arange(len(tokens), len(tokens) + s.num_tokens, device=device)
        tokens += zip(s.seq.token_ids[start:stop], keys[-s.num_tokens :], slots[-s.num_tokens :], strict=True)
        last_tokens.append(len(tokens) - 1)
        context = torch.tensor([keys, slots], device=device)  # [2, C]
        mask = see(context[0, -s.num_tokens :, None], context[0], pool.window)  # [Q, C]
        rectangles.append(Rectangle(new[None], context[1:], mask[None, None]))
    ids, positions, slots_of_new = torch.tensor(tokens, device=device).T
    last = torch.tensor(last_tokens, device=device)
    return Batch(ids, positions, slots_of_new, last, partial(gather_attention, rectangles))


class WindowEngine(ContinuousBatchingEngine):
    """Stage 5 for models with windows in some or all layers. Each kind of layers has blocks of its own.

    windows:            how many keys a query sees in each layer, and 0 for all; None: what config.json says.
    num_window_blocks:  blocks for each kind of layers with a window; None: num_blocks, as layers that see all have.
    """

    pool: Any

    def __init__(
        self,
        model: str,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        on_event: OnEvent | None = None,
        block_size: int = 16,
        num_blocks: int = 512,
        num_window_blocks: int | None = None,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        windows: SequenceOf[int] | None = None,
    ) -> None:
        local = num_blocks if num_window_blocks is None else num_window_blocks
        sizes = {"block_size": block_size, "num_blocks": num_blocks, "num_window_blocks": local}
        sizes |= {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        check_options(attention="gather", **sizes)
        self.model, self.config, self.eos_token_ids, path = load_model(
            model, device=device, dtype=dtype, model_types=(*MODEL_TYPES, "mistral"), windows=True
        )
        self.windows = read_windows(path) if windows is None else tuple(windows)
        if len(self.windows) != self.config.num_hidden_layers or min(self.windows) < 0:
            raise ValueError(f"windows must be {self.config.num_hidden_layers} numbers from 0 on, got {windows}")
        self.device, self.trace = torch.device(device), Trace(on_event)
        pools: list[WindowPool] = []
        self.caches: dict[int, PagedKVCache] = {}
        for window in sorted(set(self.windows)):
            count = local if window else num_blocks
            pools.append(WindowPool(count, block_size, window, sum(pool.num_blocks for pool in pools)))
            c = replace(self.config, num_hidden_layers=self.windows.count(window))
            self.caches[window] = PagedKVCache(c, count, block_size, self.device)
        self.pool = Pools(pools, max_num_batched_tokens, self.trace)
        self.scheduler = WindowScheduler(self.pool, max_num_seqs, max_num_batched_tokens, self.trace)

    def run(self, plan: list[Scheduled]) -> list[int]:
        """As in stage 5, but each layer reads and writes the blocks of its kind."""
        batches = {pool.window: make_window_batch(plan, pool, self.device) for pool in self.pool.pools}
        batch = batches[self.windows[0]]
        hidden = self.model(batch.input_ids, batch.positions, partial(self.attend, batches))  # [T, H]
        sampled = [i for i, s in enumerate(plan) if s.sample]
        logits = self.model.logits(hidden[batch.last_tokens[sampled]])  # [len(sampled), V]
        return sample(logits, [plan[i].seq for i in sampled])

    def attend(self, batches: dict[int, Batch], layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        window = self.windows[layer]
        return self.caches[window].attend(batches[window], self.windows[:layer].count(window), q, k, v)
