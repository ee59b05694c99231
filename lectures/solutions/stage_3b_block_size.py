"""Solution of exercise 3b. What it leaves out: a kernel that reads neighbours in one go, and a name for every block."""


def blocks(lengths: list[int], block_size: int) -> int:
    return sum(-(-length // block_size) for length in lengths)


def wasted_slots(lengths: list[int], block_size: int) -> int:
    return blocks(lengths, block_size) * block_size - sum(lengths)


def overhead(lengths: list[int], block_size: int, slot_bytes: int, entry_bytes: int = 4) -> int:
    return wasted_slots(lengths, block_size) * slot_bytes + blocks(lengths, block_size) * entry_bytes


def best_block_size(lengths: list[int], slot_bytes: int) -> int:
    sizes = [2**power for power in range(10, -1, -1)]  # the largest first, so that it wins a tie
    return min(sizes, key=lambda size: overhead(lengths, size, slot_bytes))
