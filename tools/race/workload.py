"""What every engine of the race has to do, and which engines there are. Imports no torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from stages.manifest import load_stages
from training.story_grammar import generate_story, opening

BLOCK_SIZE = 16
MAX_NUM_SEQS = 16
LONG_EVERY, LONG = 5, 6  # every fifth answer is six times as long: what a static batch waits for
LONGEST_AT_ONCE = 3  # the KV memory, in requests of the longest kind
NANOVLLM = "nanovllm"
# How the paragraphs of many stories begin. Each makes one story go on in a way of its own, without any dice.
BEGINNINGS = (
    "A gust of wind", "At a fork in the road", "The first door", "By and by", "In the night", "A grey fog",
    "When the tables stood ready,", "The moon rose,", "On the first of October", "Round the bend", "A cheeky magpie",
    "The path grew slippery,", "A stranger", "Night fell,", "One windy day", "All at once",
)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """Requests as token ids, each with the number of tokens it gets, and the limits that every engine keeps to.

    kv_slots: KV memory in tokens. max_num_seqs: how many sequences may share a step.
    """

    seed: int
    prompts: list[list[int]]
    max_tokens: list[int]
    kv_slots: int
    max_num_seqs: int = MAX_NUM_SEQS

    @property
    def num_tokens(self) -> int:
        """Tokens that are generated in all: exactly that many, since an end of text does not count."""
        return sum(self.max_tokens)

    @property
    def longest(self) -> int:
        return longest(self.prompts, self.max_tokens)

    @property
    def num_blocks(self) -> int:
        return self.kv_slots // BLOCK_SIZE


def longest(prompts: list[list[int]], max_tokens: list[int]) -> int:
    """The slots of the longest request, prompt and answer together."""
    return max(len(prompt) + n for prompt, n in zip(prompts, max_tokens, strict=True))


def make_workload(encode: Callable[[str], list[int]], num_requests: int, tokens: int, seed: int) -> Workload:
    """Two in three requests go on with a half-told story, each in its own way; the others open a story of their own.

    tokens: of the longest of the short answers; the long ones get six times as many. Raises ValueError for a size that
    makes no sense.
    """
    for name, value in (("requests", num_requests), ("tokens", tokens)):
        if value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    max_tokens: list[int] = []
    half_told = ""
    num_continued = 0
    for i in range(num_requests):
        if i % 3 == 2:
            text = opening(rng).text + "\n\n"
        else:
            way = num_continued % len(BEGINNINGS)
            if way == 0:
                half_told = half_a_story(rng)
            text = f"{half_told}\n\n{BEGINNINGS[way]}"
            num_continued += 1
        prompts.append(encode(text))
        max_tokens.append(LONG * tokens if i % LONG_EVERY == 1 else rng.randint((tokens + 1) // 2, tokens))
    blocks_of_longest = -(-longest(prompts, max_tokens) // BLOCK_SIZE)
    return Workload(seed, prompts, max_tokens, LONGEST_AT_ONCE * blocks_of_longest * BLOCK_SIZE)


def half_a_story(rng: random.Random) -> str:
    """The first sentences of a story that the model has not seen: some hundred tokens."""
    text = generate_story(rng, held_out=True).text[:600]
    return text[: text.rfind(".") + 1]


def engine_titles() -> dict[str, str]:
    """All that can take part, in the order of the ladder: "stage_4" -> "4 Prefix caching"."""
    titles = {f"stage_{stage.number}": f"{stage.number} {stage.title}" for stage in load_stages()}
    return titles | {NANOVLLM: NANOVLLM}


def choose_engines(names: list[str] | None, on_gpu: bool) -> list[str]:
    """Who takes part, in the order of the ladder, from names as typed: "4", "stage_4", "nanovllm".

    None: all but stage 7, which needs several GPUs, and without a GPU stage 6. Raises ValueError for an unknown one.
    """
    known = list(engine_titles())
    if names is None:
        return [name for name in known if name != "stage_7" and (on_gpu or name != "stage_6")]
    chosen = {f"stage_{name}" if name.isdigit() else name for name in names}
    if unknown := sorted(chosen - set(known)):
        raise ValueError(f"--stages: there is no {unknown[0]}; there are {', '.join(known)}")
    return [name for name in known if name in chosen]
