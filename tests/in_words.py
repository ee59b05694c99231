"""Numbers as one says them, as lectures spell the counts that `tests/test_lecture_counts.py` computes again."""

SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def in_words(number: int) -> str:
    """A number as one says it: 113 -> "a hundred and thirteen". Raises ValueError for a million and more."""
    if not 0 <= number < 1_000_000:
        raise ValueError(f"{number:,} is no number to be spoken; show it on the slide")
    if number < 20:
        return SMALL[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return TENS[tens - 2] + (f"-{SMALL[ones]}" if ones else "")
    size, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    many, rest = divmod(number, size)
    first = f"{'a' if many == 1 else in_words(many)} {name}"
    if not rest:
        return first
    return f"{first} {'and ' if rest < 100 else ''}{in_words(rest)}"
