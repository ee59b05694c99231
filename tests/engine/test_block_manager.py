"""Blocks and the prefix cache without a scheduler: who holds what, what is found, and what is evicted first."""

from itertools import count

import pytest

from nanovllm.engine import block_manager
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

_keys = count()


def sequence(token_ids: list[int], cache_salt: str | None = None) -> Sequence:
    return Sequence(
        key=next(_keys),
        request_id="r",
        choice=0,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        params=SamplingParams(),
        limit=1000,
        eos_ids=frozenset(),
        cache_salt=cache_salt,
    )


def enter(blocks: BlockManager, seq: Sequence) -> int:
    """Give `seq` all its blocks, compute and publish them; returns how many tokens the cache saved."""
    cached = blocks.find_prefix(seq)
    assert blocks.num_needed(len(seq.token_ids), cached) <= blocks.num_free
    blocks.share(seq, cached)
    blocks.grow(seq, len(seq.token_ids))
    blocks.publish(seq, len(seq.token_ids))
    return len(cached) * blocks.block_size


def visit(blocks: BlockManager, token_ids: list[int], cache_salt: str | None = None) -> int:
    seq = sequence(token_ids, cache_salt)
    saved = enter(blocks, seq)
    blocks.release(seq)
    return saved


def test_a_cold_pool_finds_nothing_and_a_warm_one_finds_full_blocks_only() -> None:
    blocks = BlockManager(num_blocks=8, block_size=4)
    assert visit(blocks, [1, 2, 3, 4, 5, 6]) == 0
    assert visit(blocks, [1, 2, 3, 4, 5, 6, 7]) == 4
    assert visit(blocks, [1, 2, 3, 9, 5, 6]) == 0


def test_p1_the_last_token_is_never_taken_from_the_cache() -> None:
    blocks = BlockManager(num_blocks=8, block_size=2)
    assert visit(blocks, [1, 2, 3, 4]) == 0
    assert visit(blocks, [1, 2, 3, 4]) == 2
    assert visit(blocks, [1, 2, 3, 4, 5]) == 4
    assert visit(blocks, [1]) == 0


def test_p2_a_block_that_was_refilled_is_not_found_under_its_old_name() -> None:
    blocks = BlockManager(num_blocks=5, block_size=2)
    prompts = [1, 2, 5, 6, 1, 2, 9], [5, 6, 5, 6, 9], [5, 6, 1, 2, 1, 2, 9], [1, 2, 5, 6, 9]
    saved = [visit(blocks, prompt) for prompt in prompts]
    # Least recently used: the second prompt takes the unnamed block, the untouched one, and the tail of the first
    # prompt. The third finds its own beginning and evicts the rest of the first, so that the fourth finds nothing.
    assert saved == [0, 0, 2, 0]


def test_any_string_is_a_salt() -> None:
    assert len({block_manager.root_digest(salt) for salt in (None, "", "\ud800", "\udfff", "?")}) == 5


@pytest.mark.parametrize("salts", [(None, "a"), ("a", "b"), ("", None)])
def test_p5_other_salts_share_nothing(salts: tuple[str | None, str | None]) -> None:
    blocks = BlockManager(num_blocks=8, block_size=2)
    prompt = [1, 2, 3, 4, 5]
    assert visit(blocks, prompt, salts[0]) == 0
    assert visit(blocks, prompt, salts[1]) == 0
    assert visit(blocks, prompt, salts[1]) == 4


def test_p5_ids_that_agree_in_their_low_byte_are_told_apart() -> None:
    blocks = BlockManager(num_blocks=8, block_size=2)
    assert visit(blocks, [1, 2, 3]) == 0
    assert visit(blocks, [257, 2, 3]) == 0
    assert visit(blocks, [1 + 2**16, 2, 3]) == 0
    low, high = (block_manager.packed([first, 2]) for first in (1, 1 + 2**32))
    assert block_manager.chained_digest(b"", low) != block_manager.chained_digest(b"", high)


def test_p5_equal_blocks_after_different_beginnings_are_told_apart() -> None:
    blocks = BlockManager(num_blocks=8, block_size=2)
    assert visit(blocks, [1, 2, 7, 8, 0]) == 0
    assert visit(blocks, [3, 4, 7, 8, 0]) == 0
    assert visit(blocks, [7, 8, 0]) == 0
    assert visit(blocks, [3, 4, 7, 8, 0]) == 4


def test_p5_a_digest_that_always_collides_gives_no_false_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_manager, "chained_digest", lambda parent, tokens: b"same")
    blocks = BlockManager(num_blocks=8, block_size=2)
    assert visit(blocks, [1, 2, 3]) == 0
    assert visit(blocks, [3, 4, 5]) == 0  # other tokens
    assert visit(blocks, [3, 4, 5]) == 2
    assert visit(blocks, [3, 4, 3, 4, 5]) == 2  # the same tokens, but as a second block
    assert visit(blocks, [3, 4, 5], "salt") == 0


def test_p6_the_hits_of_a_sequence_are_not_evicted_by_its_own_allocation() -> None:
    blocks = BlockManager(num_blocks=4, block_size=2)
    visit(blocks, [1, 2, 3, 4, 5])  # blocks 0 and 1 are named, and older in the free list than the unnamed 3
    visit(blocks, [9])
    seq = sequence([1, 2, 3, 4, 5, 6, 7, 8])
    cached = blocks.find_prefix(seq)
    assert len(cached) == 2
    assert blocks.num_needed(8, cached) == blocks.num_free == 4
    enter(blocks, seq)
    assert seq.block_table[:2] == cached
    assert len(set(seq.block_table)) == 4
    assert blocks.num_free == 0


def test_only_what_was_published_is_found() -> None:
    blocks = BlockManager(num_blocks=8, block_size=2)
    first, second = sequence([1, 2, 3, 4, 5]), sequence([1, 2, 3, 4, 6])
    blocks.share(first, [])
    blocks.grow(first, 5)
    assert blocks.find_prefix(second) == []
    blocks.publish(first, 3)  # the second block is computed halfway
    assert blocks.find_prefix(second) == first.block_table[:1]
    blocks.publish(first, 4)
    assert blocks.find_prefix(second) == first.block_table[:2]


def test_what_was_published_says_which_blocks_had_no_findable_equal() -> None:
    blocks = BlockManager(num_blocks=8, block_size=2)
    first, twin = sequence([1, 2, 3, 4, 5]), sequence([1, 2, 3, 4, 6])
    for seq in (first, twin):
        blocks.share(seq, [])
        blocks.grow(seq, 5)
    assert [blocks.publish(first, n) for n in (1, 2, 3, 5)] == [[], [0], [], [1]]
    assert blocks.publish(twin, 5) == [] and twin.num_published == 2
    uncached = BlockManager(num_blocks=8, block_size=2, enable_prefix_caching=False)
    uncached.share(other := sequence([1, 2, 3]), [])
    uncached.grow(other, 3)
    assert uncached.publish(other, 3) == []


def test_b2_a_shared_block_outlives_the_one_who_computed_it() -> None:
    blocks = BlockManager(num_blocks=4, block_size=2)
    first, second = sequence([1, 2, 3]), sequence([1, 2, 4])
    enter(blocks, first)
    enter(blocks, second)
    shared = first.block_table[0]
    assert second.block_table[0] == shared
    assert blocks.ref_counts[shared] == 2
    assert blocks.release(first) == [1]  # its own block, not the shared one
    enter(blocks, sequence([7, 8, 9, 7]))  # takes all that is free
    assert blocks.num_free == 0
    assert blocks.find_prefix(sequence([1, 2, 5])) == [shared]
    assert blocks.release(second)[-1] == shared


def test_b2_eviction_takes_the_least_recently_used_and_of_a_text_the_tail_first() -> None:
    blocks = BlockManager(num_blocks=6, block_size=2)
    visit(blocks, [1, 2, 3, 4, 5, 6])
    visit(blocks, [7, 8, 9, 10, 11, 12])
    visit(blocks, [1, 2, 3, 4, 0])  # uses the first two blocks of the first text again

    def cached_blocks() -> list[int]:
        return [len(blocks.find_prefix(sequence(text))) for text in ([1, 2, 3, 4, 5, 6, 0], [7, 8, 9, 10, 11, 12, 0])]

    seen = []
    evictor = sequence([20] * 12)
    for num_tokens in range(2, 13, 2):
        blocks.grow(evictor, num_tokens)
        seen.append(cached_blocks())
    # The last visit took the tail of the first text, gave it back unnamed, and so it goes first.
    assert seen == [[2, 3], [2, 2], [2, 1], [2, 0], [1, 0], [0, 0]]


def test_equal_blocks_computed_side_by_side_are_found_once_and_freed_twice() -> None:
    blocks = BlockManager(num_blocks=6, block_size=2)
    twins = sequence([1, 2, 3]), sequence([1, 2, 3])
    for seq in twins:
        blocks.share(seq, [])
        blocks.grow(seq, 3)
    for seq in twins:
        blocks.publish(seq, 3)
    assert blocks.find_prefix(sequence([1, 2, 9])) == twins[0].block_table[:1]
    for seq in twins:
        blocks.release(seq)
    assert blocks.num_free == 6
    assert blocks.find_prefix(sequence([1, 2, 9])) != []


def test_a_block_whose_beginning_was_evicted_does_not_stay_in_the_way() -> None:
    blocks = BlockManager(num_blocks=6, block_size=2)
    first, second = sequence([1, 2, 3, 4, 5]), sequence([1, 2, 3, 4, 5])
    for seq in (first, second):  # neither finds the other: two equal first blocks, and only one can be found
        blocks.share(seq, [])
        blocks.grow(seq, 5)
    blocks.publish(first, 2)
    blocks.publish(second, 4)
    blocks.release(first)
    evictor = sequence([7, 8, 7, 8, 7, 8])
    enter(blocks, evictor)
    assert blocks.find_prefix(sequence([1, 2, 3, 4, 5])) == []
    blocks.release(evictor)
    assert visit(blocks, [1, 2, 3, 4, 6]) == 0
    assert visit(blocks, [1, 2, 3, 4, 6]) == 4


def test_what_a_failed_sequence_computed_is_not_found() -> None:
    blocks = BlockManager(num_blocks=6, block_size=2)
    seq = sequence([1, 2, 3, 4, 5])
    enter(blocks, seq)
    blocks.release(seq, keep_cached=False)
    assert blocks.num_free == 6
    assert visit(blocks, [1, 2, 3, 4, 5]) == 0


def test_without_prefix_caching_nothing_is_hashed_or_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_manager, "chained_digest", None)
    blocks = BlockManager(num_blocks=8, block_size=2, enable_prefix_caching=False)
    assert [visit(blocks, [1, 2, 3, 4, 5]) for _ in range(2)] == [0, 0]
    assert blocks.num_free == 8


def test_a_sequence_is_hashed_once_however_often_it_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []
    digest = block_manager.chained_digest

    def spy(parent: bytes, tokens: bytes) -> bytes:
        hashed.append(tokens)
        return digest(parent, tokens)

    monkeypatch.setattr(block_manager, "chained_digest", spy)
    blocks = BlockManager(num_blocks=8, block_size=2)
    seq = sequence([1, 2, 3, 4, 5, 6, 7])
    for _ in range(3):  # as if it were preempted twice
        enter(blocks, seq)
        blocks.find_prefix(seq)
        blocks.release(seq)
    assert hashed == [block_manager.packed(token_ids) for token_ids in ([1, 2], [3, 4], [5, 6])]


def in_windows(blocks: BlockManager, num_tokens: int) -> Sequence:
    """A sequence whose tokens are all computed but the last."""
    seq = sequence([*range(num_tokens)])
    blocks.share(seq, [])
    blocks.grow(seq, num_tokens)
    seq.num_computed = num_tokens - 1
    return seq


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize(("window", "num_unseen"), [(1, 4), (2, 3), (3, 3), (4, 2), (7, 1), (8, 0), (100, 0)])
def test_blocks_that_no_window_reaches_come_free(window: int, num_unseen: int, caching: bool) -> None:
    """The next token is the ninth, in a fifth block. Its window of 3 has the seventh in the fourth block, too."""
    blocks = BlockManager(num_blocks=5, block_size=2, enable_prefix_caching=caching, window=window)
    seq = in_windows(blocks, 9)
    blocks.publish(seq, 8)
    assert sorted(blocks.release_unseen(seq)) == sorted(blocks.free) == sorted(seq.block_table[:num_unseen])
    assert blocks.release_unseen(seq) == [] and len(seq.block_table) == 5
    found = blocks.find_prefix(sequence([*range(9)]))
    assert found == (seq.block_table[:4] if caching else [])  # also those that are free, as long as nobody takes them
    assert len(blocks.release(seq)) == 5 - num_unseen and seq.block_table == []
    assert blocks.num_free == 5 and not any(blocks.ref_counts)


def test_a_block_waits_for_its_publication_and_for_its_other_users() -> None:
    blocks = BlockManager(num_blocks=8, block_size=2, window=1)
    seq = in_windows(blocks, 9)
    assert blocks.release_unseen(seq) == []  # no step is committed yet
    blocks.publish(seq, 5)
    other = sequence([*range(9)])
    enter(blocks, other)
    assert other.block_table[:2] == seq.block_table[:2]
    assert blocks.release_unseen(seq) == [] and seq.num_unseen == 2
    other.num_computed = 3
    assert blocks.release_unseen(other) == seq.block_table[:1]


def test_what_a_failed_sequence_gave_back_early_is_not_found_either() -> None:
    blocks = BlockManager(num_blocks=8, block_size=2, window=2)
    seq = in_windows(blocks, 9)
    blocks.publish(seq, 8)
    assert len(blocks.release_unseen(seq)) == 3
    blocks.release(seq, keep_cached=False)
    assert blocks.find_prefix(sequence([*range(9)])) == [] and not blocks.block_by_digest
