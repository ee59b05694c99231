"""Stage 4's parts: names, reference counts, and which block is forgotten first. No model anywhere."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.core import SamplingParams, Sequence
from tests import oracle
from tests.oracle_record import record_alone
from tests.stages.likely import check, exercise
from tests.stages.requests import greedy, random_prompts
from tests.stages.subject import Subject, since
from tests.weights import lively_qwen3

Admit = Callable[..., Sequence]


@pytest.fixture
def make_pool(subject: Subject) -> Callable[..., Any]:
    """make_pool(num_blocks, block_size=2)"""
    return lambda num_blocks, block_size=2: subject.part("PrefixCachingPool")(num_blocks, block_size)


def admit(pool: Any, *tokens: int, compute: bool = True) -> Sequence:
    """A sequence with blocks for all its tokens, computed and published unless told otherwise."""
    seq = Sequence(0, list(tokens), len(tokens), SamplingParams(), seed=0)
    assert pool.allocate(seq, len(tokens))
    if compute:
        seq.num_computed = len(tokens)
        pool.publish(seq)
    return seq


def hits(pool: Any, *tokens: int) -> int:
    """How many tokens a new sequence would find."""
    return len(pool.find_prefix(Sequence(0, list(tokens), len(tokens), SamplingParams(), seed=0))) * pool.block_size


@exercise("4.1")
def test_a_name_depends_on_every_token_and_on_the_parent(subject: Subject) -> None:
    digest = subject.part("chained_digest")
    first = digest(0, (1, 2))
    assert isinstance(first, int), f"a digest is an int, not {type(first)}\nlikely: it is xxhash.xxh64_intdigest(data)"
    seen: dict[int, tuple[int, tuple[int, ...]]] = {}
    likely = "\nlikely: the parent's digest is left out"
    for tokens in ((1, 2), (2, 1), (257, 2), (1, 258), (1,), (65537, 2)):
        for parent in (0, 1, 2**64 - 1):
            name = digest(parent, tokens)
            assert 0 <= name < 2**64, f"{name} has no 64 bits\nlikely: Python's hash in place of xxhash.xxh64_intdigest"
            twin = seen.setdefault(name, (parent, tokens))
            told = f"one name for tokens {tokens} after parent {parent}, and for {twin[1]} after {twin[0]}"
            assert twin == (parent, tokens), told + likely
        likely = "\nlikely: a token is more than a byte, and their order matters: array('q', tokens).tobytes()"
    there, back = (digest(digest(0, a), b) for a, b in (((1, 2), (3, 4)), ((3, 4), (1, 2))))
    assert there != back, (
        "one name for 1 2 3 4 and for 3 4 1 2, in blocks of 2\n"
        "likely: the order of the blocks is lost where two hashes are combined: hash the digest and the tokens as one"
    )
    check("the digest of the same tokens after the same parent", digest(5, (1, 2)), digest(5, (1, 2)))
    assert digest(0, (0,)) != digest(0, (0, 0)) and digest(0, (1, 0)) != digest(0, (256,))


def published(subject: Subject, num_blocks: int, *texts: tuple[int, ...]) -> tuple[Any, list[Sequence]]:
    """A pool of blocks of 2 tokens that knows these texts, set up without `allocate`; each has blocks of its own."""
    pool, sequences = subject.part("PrefixCachingPool")(num_blocks, 2), []
    for tokens in texts:
        seq = Sequence(0, list(tokens), len(tokens), SamplingParams(), seed=0)
        seq.block_table = [pool.free_list.popitem(last=False)[0] for _ in range(pool.num_blocks_for(len(tokens)))]
        for block in seq.block_table:
            pool.ref_counts[block] = 1
        seq.num_computed = len(tokens)
        pool.publish(seq)
        sequences.append(seq)
    return pool, sequences


def unknown(*tokens: int) -> Sequence:
    return Sequence(0, list(tokens), len(tokens), SamplingParams(), seed=0)


@exercise("4.2")
def test_the_walk_follows_the_chain_and_stops_at_the_first_miss(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks 0, 1, 2 hold 1 2, 3 4, 5 6 of a text; blocks 4, 5 hold 7 8, 3 4 of another."""
    pool, _ = published(subject, 12, (1, 2, 3, 4, 5, 6, 9), (7, 8, 3, 4, 9))
    likely: dict[str, Any] = {
        "nothing is found (block 0 is a block, too: the test is `is None`, not `not`)": [],
        "only the first block is found: this block's content is the next one's parent": [0],
        "contents, not blocks: self.block_by_digest leads from a digest to the block": [
            pool.contents[i] for i in range(3)
        ],
    }
    check("blocks found for 1 2 3 4 5 6 0", pool.find_prefix(unknown(1, 2, 3, 4, 5, 6, 0)), [0, 1, 2], likely)
    likely = {"3 4 is found after any beginning: the parent's digest is part of the name": [0, 5]}
    check("blocks found for 1 2 3 4 0", pool.find_prefix(unknown(1, 2, 3, 4, 0)), [0, 1], likely)
    likely = {"the search goes on after a miss: behind an unknown block stands another text": [0]}
    check("blocks found for 0 0 1 2 0", pool.find_prefix(unknown(0, 0, 1, 2, 0)), [], likely)
    likely = {"what was found before the miss is lost: end the loop with break": []}
    check("blocks found for 1 2 0 0 5 6 0", pool.find_prefix(unknown(1, 2, 0, 0, 5, 6, 0)), [0], likely)
    home = subject.home("PrefixCachingPool")
    monkeypatch.setattr(home, "chained_digest", lambda parent, tokens: 7)
    pool, _ = published(subject, 6, (1, 2, 9))
    likely = {"a digest that is found is trusted: compare the content, too, with content.matches(parent, tokens)": [0]}
    check("blocks found for 3 4 0, where all digests are equal", pool.find_prefix(unknown(3, 4, 0)), [], likely)
    likely = {"the tokens alone are compared: `parent` is the content of the block before, not content.parent": [0, 0]}
    check("blocks found for 1 2 1 2 0, where all are equal", pool.find_prefix(unknown(1, 2, 1, 2, 0)), [0], likely)


@exercise("4.3")
def test_known_blocks_are_shared_and_the_missing_ones_taken(subject: Subject) -> None:
    """Of 7 blocks of 2 tokens, 0, 1, 2 hold a text that is running; then the same text once it is over."""
    pool, _ = published(subject, 7, (1, 2, 3, 4, 9))
    pool.find_prefix = lambda seq: [0, 1]  # what exercise 4.2 finds
    twin = unknown(1, 2, 3, 4, 8, 8, 8)
    assert pool.allocate(twin, 7), "refused, though 4 blocks are free and 2 are missing"
    likely: dict[str, Any] = {"from the end of the free list; its front is popitem(last=False)": [0, 1, 6, 5]}
    check("table: two shared blocks, two from the front of the free list", twin.block_table, [0, 1, 3, 4], likely)
    likely = {
        "the shared blocks have two owners now: raise all counts by 1": [1, 1, 1, 1, 1, 0, 0],
        "the new blocks are not counted": [2, 2, 1, 0, 0, 0, 0],
    }
    check("reference counts", pool.ref_counts, [2, 2, 1, 1, 1, 0, 0], likely)
    check("free blocks", list(pool.free_list), [5, 6])
    known = [content is not None for content in pool.contents]
    likely = {
        "shared blocks are forgotten: only blocks that will be refilled lose their names": [False, False] + [False] * 5
    }
    check("blocks that hold something known", known, [True, True] + [False] * 5, likely)

    # The same text, free but not forgotten, stands at the front of the free list
    pool, _ = published(subject, 4, (1, 2, 3, 4, 9))
    pool.find_prefix = lambda seq: [0, 1]
    for block in (0, 1, 2):
        pool.ref_counts[block], pool.free_list[block] = 0, None
        pool.free_list.move_to_end(block)
    pool.free_list.move_to_end(3)  # 0, 1, 2, 3 from front to back
    twin = unknown(1, 2, 3, 4, 8)
    assert pool.allocate(twin, 5), "refused, though 1 block is missing and 2 are free beside the shared ones"
    likely = {
        "new blocks are taken before the shared blocks have left the free list: a block is in the table twice": [
            0,
            1,
            0,
        ],
    }
    check("table, with the known blocks at the front of the free list", twin.block_table, [0, 1, 2], likely)
    likely = {"the shared blocks are still in the free list, and would be handed out again": [0, 1, 3]}
    check("free blocks", list(pool.free_list), [3], likely)
    pool, _ = published(subject, 4, (1, 2, 9))
    for block in (0, 1):
        pool.ref_counts[block], pool.free_list[block] = 0, None
    pool.find_prefix = lambda seq: []
    assert pool.allocate(unknown(5, 6, 7, 8, 5, 6, 7), 7)
    likely = {"a new block keeps its old name: self.forget(block)": [0]}
    check("blocks with a name, after all were handed out", [*pool.block_by_digest.values()], [], likely)


@exercise("4.4")
def test_blocks_come_back_when_their_last_owner_leaves_and_in_reverse(subject: Subject) -> None:
    """Blocks 0, 1 are shared by two sequences; 2 and 3 are the first one's own."""
    pool, [seq] = published(subject, 6, (1, 2, 3, 4, 5, 6, 9))
    pool.ref_counts[0] = pool.ref_counts[1] = 2
    pool.free_list.clear()
    pool.free_list[5] = None
    freed = pool.release(seq)
    likely = {
        "the counts were not lowered": [2, 2, 1, 1, 0, 0],
        "all counts became 0: each block has a count of its own": [0, 0, 0, 0, 0, 0],
    }
    check("reference counts", pool.ref_counts, [1, 1, 0, 0, 0, 0], likely)
    likely = {
        "shared blocks are freed while another sequence uses them: free a block only at a count of 0": [5, 3, 2, 1, 0],
        "the blocks came back from first to last: the end of a text should be evicted before its beginning": [5, 2, 3],
        "the blocks came to the front: what was used last should be evicted last": [2, 3, 5],
        "no block came back: first lower the count, then see whether it is 0": [5],
    }
    check("free list, front first, with 5 in it before", list(pool.free_list), [5, 3, 2], likely)
    check("returned", freed, [3, 2], {"freed.append(block) is missing": []})
    known = [content is not None for content in pool.contents[:4]]
    likely = {"the contents of a freed block stay known until it is handed out again": [True, True, False, False]}
    check("blocks 0 to 3 are known", known, [True, True, True, False], likely)


@since(4)
def test_only_full_computed_blocks_are_found(make_pool: Callable[..., Any]) -> None:
    pool = make_pool(8)
    seq = admit(pool, 1, 2, 3, 4, 5, compute=False)
    assert hits(pool, 1, 2, 3, 4, 5) == 0
    seq.num_computed = 3
    pool.publish(seq)
    assert hits(pool, 1, 2, 3, 4, 5) == 2
    seq.num_computed = 5
    pool.publish(seq)
    assert hits(pool, 1, 2, 3, 4, 5) == 4
    assert hits(pool, 1, 2, 3, 4, 5, 6, 7) == 4  # the block of 5 is not full
    assert hits(pool, 1, 2, 3, 4) == 2  # the last token is always computed
    assert (hits(pool, 1, 2, 9), hits(pool, 1, 9, 9), hits(pool, 3, 4, 9), hits(pool, 1)) == (2, 0, 0, 0)


@since(4)
def test_prefix_p5_identity(make_pool: Callable[..., Any]) -> None:
    """Token ids with the same low byte; the same block after different beginnings; a beginning that is missing."""
    pool = make_pool(16)
    admit(pool, 1, 2, 3, 4, 9)
    for stranger in ((257, 2, 9), (1, 258, 9), (1, 2, 259, 4, 9), (65537, 2, 9)):
        assert hits(pool, *stranger) == (2 if stranger[:2] == (1, 2) else 0)
    admit(pool, 5, 6, 3, 4, 9)
    assert (hits(pool, 5, 6, 3, 4, 9), hits(pool, 7, 8, 3, 4, 9), hits(pool, 3, 4, 3, 4, 9)) == (4, 0, 0)
    assert hits(pool, 1, 2, 5, 6, 3, 4, 9) == 2


@since(4)
def test_a_shared_block_is_free_when_its_last_owner_leaves(make_pool: Callable[..., Any]) -> None:
    pool = make_pool(8)
    a = admit(pool, 1, 2, 3, 4, 5)
    b = admit(pool, 1, 2, 3, 4, 6)
    c = admit(pool, 1, 2, 9)
    assert a.block_table[:2] == b.block_table[:2] and c.block_table[0] == a.block_table[0]
    assert a.block_table[2] != b.block_table[2]
    first, second, own = a.block_table
    assert [pool.ref_counts[block] for block in (first, second, own)] == [3, 2, 1]
    assert pool.release(a) == [own]
    assert pool.release(c) != [] and pool.ref_counts[first] == 1
    assert first not in pool.free_list and second not in pool.free_list
    assert set(pool.release(b)) >= {first, second}
    assert len(pool.free_list) == 8 and not any(pool.ref_counts)
    assert hits(pool, 1, 2, 3, 4, 5) == 4  # free, and still known


@since(4)
def test_a_hit_on_a_free_block_takes_it_out_of_the_free_list(make_pool: Callable[..., Any]) -> None:
    """Or it would be handed out as empty to the next one while the first reads it."""
    pool = make_pool(4)
    pool.release(admit(pool, 1, 2, 3, 4, 5))
    a = admit(pool, 1, 2, 3, 4, 6)
    assert a.num_computed == 5 and len(pool.free_list) == 1
    b = admit(pool, 7)
    assert not set(a.block_table) & set(b.block_table) and not pool.free_list


@since(4)
def test_prefix_p6_room_is_counted_without_the_hits_themselves(make_pool: Callable[..., Any]) -> None:
    pool = make_pool(4)
    pool.release(admit(pool, 1, 2, 3, 4, 5))
    blocker = admit(pool, 9)  # three are free, two of which are hits of what follows
    assert len(pool.free_list) == 3
    seq = Sequence(0, [1, 2, 3, 4, 6, 7, 8], 7, SamplingParams(), seed=0)
    assert not pool.allocate(seq, 7)  # two more than the hits are needed, only one is left
    assert seq.block_table == [] and seq.num_computed == 0 and len(pool.free_list) == 3
    assert pool.allocate(seq, 6) and seq.num_computed == 4 and not pool.free_list
    assert not set(seq.block_table) & set(blocker.block_table)


@since(4)
def test_prefix_p2_a_refilled_block_loses_its_name(make_pool: Callable[..., Any]) -> None:
    pool = make_pool(3)
    pool.release(admit(pool, 1, 2, 3, 4, 5))
    pool.release(admit(pool, 11, 12, 13, 14, 15))
    assert hits(pool, 1, 2, 3, 4, 5) == 0 and hits(pool, 11, 12, 13, 14, 15) == 4
    half = admit(pool, 21, compute=False)  # takes a block, writes nothing that has a name
    assert hits(pool, 11, 12, 13, 14, 15) == 4  # the unfinished tail went first
    pool.release(half)


@since(4)
def test_blocks_b2_least_recently_used_first_tails_before_beginnings(make_pool: Callable[..., Any]) -> None:
    pool = make_pool(6)
    old, recent = (1, 2, 3, 4, 5), (11, 12, 13, 14, 15)
    a, b = admit(pool, *old), admit(pool, *recent)
    pool.release(a)
    pool.release(b)
    evicted = []
    others = []
    for token in range(100, 106):
        others.append(admit(pool, token))
        evicted.append((hits(pool, *old), hits(pool, *recent)))
    assert evicted == [(4, 4), (2, 4), (0, 4), (0, 4), (0, 2), (0, 0)]


@since(4)
def test_blocks_b2_a_hit_makes_a_block_recent_again(make_pool: Callable[..., Any]) -> None:
    pool = make_pool(6)
    for tokens in ((1, 2, 3, 4, 5), (11, 12, 13, 14, 15)):
        pool.release(admit(pool, *tokens))
    pool.release(admit(pool, 1, 2, 3, 4, 6))  # used again, after the others
    admit(pool, 21, 22, 23, 24, 25, compute=False)  # three blocks
    assert hits(pool, 1, 2, 3, 4, 5) == 4 and hits(pool, 11, 12, 13, 14, 15) < 4


@since(4)
def test_two_blocks_with_one_name(make_pool: Callable[..., Any]) -> None:
    """Computed twice at the same time: one of them can be found, and reusing the other does not hide it."""
    pool = make_pool(6)
    a, b = admit(pool, 1, 2, 3, compute=False), admit(pool, 1, 2, 4, compute=False)
    for seq in (a, b):
        seq.num_computed = 3
        pool.publish(seq)
    assert pool.find_prefix(a) == [a.block_table[0]]
    pool.release(b)
    for token in range(50, 54):  # every free block is refilled, b's too
        admit(pool, token)
    assert not pool.free_list and pool.find_prefix(a) == [a.block_table[0]]


@since(4)
def test_prefix_p1_warm_logits_equal_cold_ones(subject: Subject, checkpoints: Path) -> None:
    """A prompt that is cached as a whole is computed from its last block on, and scored the same."""
    path = lively_qwen3(checkpoints)
    engine = subject.engine(path, block_size=2, num_blocks=32)
    [prompt] = random_prompts(8)
    (cold, first), (warm, second) = (record_alone(engine, prompt, greedy(4)) for _ in range(2))
    assert warm == cold
    assert second.steps[0].positions == [6, 7]
    for a, b in zip(first.steps, second.steps, strict=True):
        assert a.logits is not None and b.logits is not None
        oracle.check_logits(b.logits, a.logits)


@since(4)
def test_a_shared_beginning_is_computed_once(subject: Subject, checkpoints: Path) -> None:
    """The showcase, in tokens: eight prompts of 40 + 2, the second to eighth compute little more than their own two."""
    engine = subject.engine(lively_qwen3(checkpoints), block_size=4, num_blocks=64, max_num_batched_tokens=42)
    [shared] = random_prompts(40)
    computed = []
    engine.trace.on_event = lambda e: computed.append(e["tokens"]) if e["type"] == "scheduled" else None
    engine.generate([[*shared, i, i] for i in range(8)], greedy(1))
    assert sum(computed) == 42 + 7 * 2
    assert torch.tensor(computed).max() == 42
