"""Stage 3's parts: the pool, the slots, the batch, and attention through a block table."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.checkpoint import read_config
from stages.core import SamplingParams, Sequence
from tests.oracle_explain import attention
from tests.stages.events import Listener
from tests.stages.likely import check, exercise
from tests.stages.requests import greedy, random_prompts
from tests.stages.subject import Subject, since
from tests.weights import lively_qwen3


def sequence(num_tokens: int, table: list[int] | None = None, num_computed: int = 0) -> Sequence:
    tokens = list(range(100, 100 + num_tokens))
    seq = Sequence(0, tokens, num_tokens, SamplingParams(), seed=0)
    seq.block_table, seq.num_computed = list(table or []), num_computed
    return seq


def in_the_pool(pool: Any) -> list[int]:
    return sorted(pool.free_list)


def room_for(pool: Any, seq: Sequence, num_tokens: int) -> bool:
    """What `allocate` returns."""
    took = pool.allocate(seq, num_tokens)
    assert took in (True, False), f"allocate returned {took!r}, not True or False\nlikely: a `return True` is missing"
    return bool(took)


@exercise("3.1")
def test_a_sequence_gets_the_blocks_that_it_lacks(subject: Subject) -> None:
    """Blocks of 4 tokens, a pool of 5: for 4 tokens, 1, 5, 8, 9, and for 3, which need no more."""
    pool, seq = subject.part("BlockPool")(num_blocks=5, block_size=4), sequence(12)
    for num_tokens, blocks in ((4, 1), (1, 1), (5, 2), (8, 2), (9, 3), (3, 3)):
        had, free = len(seq.block_table), list(pool.free_list)
        fits = room_for(pool, seq, num_tokens)
        assert fits, f"room for {num_tokens} tokens was refused, with the free blocks {free}"
        likely = {
            "as many blocks as there are tokens: self.num_blocks_for counts blocks": [*range(num_tokens)],
            "rounded down: what does not fill a block needs one all the same": [*range(num_tokens // 4)],
            "one block too many where the tokens fill theirs exactly": [*range(num_tokens // 4 + 1)],
            "room for all tokens that the sequence has: num_tokens says for how many": [0, 1, 2],
            "all blocks are taken again: the blocks that the sequence has already are not missing": [
                *range(had + blocks)
            ],
            "from the end of the free list: popitem(last=False) takes from its front": [4],
            "popitem returns a pair: block, _ = self.free_list.popitem(last=False)": [(0, None)],
            "the blocks that the sequence had are lost from its table": [*range(had, blocks)],
        }
        check(f"table, with room for {num_tokens} tokens", seq.block_table, [*range(blocks)], likely)
        likely = {"a block that is taken must leave the free list": [0, 1, 2, 3, 4]}
        check(f"free blocks beside {seq.block_table}", [*pool.free_list], [*range(blocks, 5)], likely)


@exercise("3.1")
def test_all_the_blocks_or_none(subject: Subject) -> None:
    """Two blocks of 4 tokens are free: not enough for 9 tokens, and just enough for 8."""
    pool, seq, other = subject.part("BlockPool")(num_blocks=5, block_size=4), sequence(12), sequence(13)
    assert room_for(pool, seq, 12), "room for 12 tokens was refused, though all 5 blocks are free"
    check("room for 9 tokens in the 2 free blocks", room_for(pool, other, 9), False)
    likely: dict[str, Any] = {"the free blocks are taken before the refusal: count the missing blocks first": [3, 4]}
    check("table of a sequence that was refused", other.block_table, [], likely)
    check("free blocks after that", list(pool.free_list), [3, 4])
    likely = {"the number of free blocks equals the number of missing blocks, which is enough: > in place of >=": False}
    check("room for 8 tokens in the 2 free blocks", room_for(pool, other, 8), True, likely)
    check("table", other.block_table, [3, 4])


@since(3)
def test_blocks_are_taken_as_needed_and_all_or_none(subject: Subject) -> None:
    pool = subject.part("PrefixCachingPool" if subject.number > 3 else "BlockPool")(num_blocks=5, block_size=4)
    seq, other = sequence(8), sequence(13)
    for num_tokens, blocks in ((1, 1), (4, 1), (5, 2), (8, 2), (9, 3), (3, 3)):
        assert pool.allocate(seq, num_tokens) and len(seq.block_table) == blocks, f"{num_tokens} tokens"
    assert len(set(seq.block_table)) == 3
    assert not pool.allocate(other, 9)  # three blocks, two are free
    assert other.block_table == [] and len(pool.free_list) == 2
    assert pool.allocate(other, 8)
    assert not set(other.block_table) & set(seq.block_table) and not pool.free_list
    assert pool.allocate(seq, 12)  # it has room for 12 tokens already
    assert not pool.allocate(seq, 13)
    table = list(seq.block_table)
    assert sorted(pool.release(seq)) == sorted(table) == in_the_pool(pool) and seq.block_table == []
    pool.release(other)
    assert in_the_pool(pool) == [0, 1, 2, 3, 4]


@exercise("3.2")
def test_a_slot_is_block_times_size_plus_offset(subject: Subject) -> None:
    """Blocks of 4 tokens, and the block table [7, 0, 3]."""
    table = [7, 0, 3]
    seq, slots_of = sequence(10, table), subject.part("slots_of")
    for start, stop in ((0, 10), (3, 5), (4, 4), (9, 10)):
        blocks = [table[p // 4] for p in range(start, stop)]
        offsets = [p % 4 for p in range(start, stop)]
        right = [4 * b + o for b, o in zip(blocks, offsets, strict=True)]
        likely = {
            "block + offset, without block_size": [b + o for b, o in zip(blocks, offsets, strict=True)],
            "the first slot of each block: the offset is missing": [4 * b for b in blocks],
            "positions, as if block i of the text were block i of the pool": [*range(start, stop)],
            "counted on from the first block: the table says where each block lies": [
                28 + p for p in range(start, stop)
            ],
            "offsets are counted from `start`; they count from position 0": [
                4 * b + (p - start) % 4 for b, p in zip(blocks, range(start, stop), strict=True)
            ],
            "one position too many: `stop` is not included": [*right, (4 * table[stop // 4] + stop % 4)],
        }
        check(f"slots of tokens {start} to {stop - 1}", slots_of(seq, start, stop, 4), right, likely)
    check("slots of tokens 0 to 2 in blocks of 1", slots_of(seq, 0, 3, 1), [7, 0, 3])


@exercise("3.3")
def test_the_gather_is_attention_over_the_slots_of_a_sequence(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences of two new tokens each: 4 query heads over 2 key/value heads, and two tokens come last to first."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, heads, 8, generator=generator) for n, heads in ((4, 4), (12, 2), (12, 2)))
    tokens, slots = torch.tensor([[2, 3], [0, 1]]), torch.tensor([[8, 9, 2, 3], [5, 4, 5, 5]])
    last_key = torch.tensor([[2, 3], [0, 1]])  # [R, Q]: the second sequence has 2 keys, and 2 of padding

    def attend(values: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        for r in range(2):
            out[tokens[r]] = attention(q[tokens[r]], k[slots[r]], values[slots[r]], visible[r])
        return out

    column = torch.arange(4)
    seen = column <= last_key[:, :, None]  # [R, Q, C]
    everything, causal = torch.ones_like(seen), (column <= torch.arange(2)[:, None]).expand_as(seen)
    rectangle = subject.part("Rectangle")(tokens, slots, seen[:, None])
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, torch.nan))  # what nobody writes stays so
    out = subject.part("gather_attention")([rectangle], q, k.view(3, 4, 2, 8), v.view(3, 4, 2, 8))
    right = attend(v, seen)
    likely = {
        "nothing came into `out`: indexing with a tensor makes a copy, so assign to out[r.tokens]": q * torch.nan,
        "every key is seen, padding too: r.mask is not used": attend(v, everything),
        "is_causal counts from the first key of the rectangle, not from the sequence's: use r.mask": attend(v, causal),
        "the values are read from the blocks of the keys": attend(k, seen),
        "heads and tokens are mixed up: transpose them back, reshape does not swap dimensions": torch.cat(
            [right[t].transpose(0, 1).reshape(2, 4, 8) for t in tokens.flip(0)]
        ),
        "in the order of the rectangle: out[r.tokens] = ... puts each token where it belongs": right[tokens.flatten()],
    }
    check("attention", out, right, likely)


@since(3, 3)
def test_a_batch_is_the_new_tokens_end_to_end(subject: Subject) -> None:
    """A prefill, a chunk in the middle and a decode in one step."""
    work = [
        (sequence(5, [2, 6]), 5),
        (sequence(9, [1, 4, 0], num_computed=3), 4),
        (sequence(4, [5], num_computed=3), 1),
    ]
    batch = subject.part("make_batch")(work, 4, torch.device("cpu"))
    assert batch.input_ids.tolist() == [100, 101, 102, 103, 104, 103, 104, 105, 106, 103]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 6, 3]
    assert batch.slots.tolist() == [8, 9, 10, 11, 24, 7, 16, 17, 18, 23]
    assert batch.last_tokens.tolist() == [4, 8, 9]


@since(3, 3)
def test_attention_follows_the_block_table(subject: Subject, checkpoints: Path) -> None:
    """Blocks in any order, chunks and decodes mixed, and everything that belongs to nobody poisoned."""
    config = read_config(lively_qwen3(checkpoints))  # 4 query heads over 2 KV heads, head_dim 32
    config = replace(config, dtype=torch.float32)
    cache = subject.part("PagedKVCache")(config, 8, 4, torch.device("cpu"))
    cache.k.fill_(1e4)
    cache.v.fill_(1e4)
    work = [
        (sequence(9, [6, 1, 4], num_computed=5), 4),
        (sequence(6, [0, 7], num_computed=5), 1),
        (sequence(3, [3]), 3),
    ]
    batch = subject.part("make_batch")(work, 4, torch.device("cpu"))
    past = [torch.randn(2, len(seq.token_ids), 2, 32) for seq, _ in work]  # the true keys and values of each sequence
    for (seq, _), kv in zip(work, past, strict=True):
        for position in range(len(seq.token_ids)):
            block, offset = seq.block_table[position // 4], position % 4
            cache.k[1, block, offset], cache.v[1, block, offset] = kv[:, position]
    new = [torch.cat([kv[i, seq.num_computed :] for (seq, _), kv in zip(work, past, strict=True)]) for i in (0, 1)]
    before = cache.k.clone()
    q = torch.randn(8, 4, 32)
    out = cache.attend(batch, 1, q, *new)
    assert torch.equal(cache.k, before)  # each new key came to lie exactly where this test had put it
    row = 0
    for (seq, n), (keys, values) in zip(work, past, strict=True):
        for position in range(seq.num_computed, seq.num_computed + n):
            for head in range(4):
                weights = (keys[: position + 1, head // 2] @ q[row, head] * 32**-0.5).softmax(0)
                torch.testing.assert_close(out[row, head], weights @ values[: position + 1, head // 2])
            row += 1


@since(3, 3)
def test_any_blocks_in_any_order(subject: Subject, checkpoints: Path) -> None:
    path = lively_qwen3(checkpoints)
    engine, shuffled = (subject.engine(path, block_size=4, num_blocks=40) for _ in range(2))
    for block in (0, 1, 17, 5, 33, 2):
        shuffled.pool.free_list.move_to_end(block)
    prompts = random_prompts(3, 14, 9)
    assert shuffled.generate(prompts, greedy(9)) == engine.generate(prompts, greedy(9))


@since(3, 4)
def test_a_batch_is_as_large_as_its_reservations_allow(subject: Subject, checkpoints: Path) -> None:
    """Each sequence reserves prompt + max_tokens - 1 slots: here 8, two blocks, so that three fit in seven."""
    listener = Listener()
    engine = subject.engine(lively_qwen3(checkpoints), block_size=4, num_blocks=7, on_event=listener)
    prompts = random_prompts(3, 3, 3, 3)
    params = [greedy(6, ignore_eos=True)] * 4
    engine.generate(prompts, params)
    order = [(e["type"], e["request"]) for e in listener.events if e["type"] in ("admitted", "finished")]
    assert order[-2:] == [("admitted", 3), ("finished", 3)]
    assert {kind for kind, _ in order[:3]} == {"admitted"} and {kind for kind, _ in order[3:6]} == {"finished"}
    taken = [len(e["taken"]) + len(e["shared"]) for e in listener.events if e["type"] == "blocks" and not e["freed"]]
    assert taken == [2, 2, 2, 2]
