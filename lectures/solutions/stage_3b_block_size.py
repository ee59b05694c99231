"""Solution of exercise 3b. What it leaves out: a kernel that reads neighbours in one go, and a name for every block."""


def wasted_slots(lengths: list[int], block_size: int) -> int:
    # exercise 3b: slots never filled
    return sum(-length % block_size for length in lengths)
    # end exercise


def overhead(lengths: list[int], block_size: int, slot_bytes: int, entry_bytes: int = 4) -> int:
    # exercise 3b: bytes of the wasted slots and of the tables
    blocks = sum(-(-length // block_size) for length in lengths)
    return wasted_slots(lengths, block_size) * slot_bytes + blocks * entry_bytes
    # end exercise


def best_block_size(lengths: list[int], slot_bytes: int) -> int:
    # exercise 3b: the power of two with the least overhead
    sizes = [2**power for power in range(10, -1, -1)]  # the largest first, so that it wins a tie
    return min(sizes, key=lambda size: overhead(lengths, size, slot_bytes))
    # end exercise
