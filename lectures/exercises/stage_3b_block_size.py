"""Exercise 3b: Which block size is best? Put a price on both sides.

Large blocks waste slots at the end of every sequence. Small blocks need long tables: an entry for every block, which is
kept in memory and read in every step. So there is a best size in between, and it depends on the lengths of the texts.

    wasted_slots(lengths, block_size) -> int
        slots that sequences of these lengths never fill, as stage 3 hands blocks out

    overhead(lengths, block_size, slot_bytes, entry_bytes=4) -> int
        bytes that the choice of this size costs: what the wasted slots would hold, and one entry a block

    best_block_size(lengths, slot_bytes) -> int
        of 1, 2, 4 ... 1024 the one with the least overhead; of equals, the largest

Then look at it for a model of your choice: Llama-3.1-8B in bf16 has slots of 128 KiB. Why do all engines take larger
blocks than that says? (What does your formula leave out? See the notebook of stage 3, "Is it frugal?".)

Check: .venv/bin/python -m tools.lectures.lecture_exercises 3b
"""


def wasted_slots(lengths: list[int], block_size: int) -> int:
    raise NotImplementedError("exercise 3b: slots never filled")


def overhead(lengths: list[int], block_size: int, slot_bytes: int, entry_bytes: int = 4) -> int:
    raise NotImplementedError("exercise 3b: bytes of the wasted slots and of the tables")


def best_block_size(lengths: list[int], slot_bytes: int) -> int:
    raise NotImplementedError("exercise 3b: the power of two with the least overhead")
