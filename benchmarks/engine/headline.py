"""The workload that the field quotes: 256 requests, 100 to 1024 tokens in, 100 to 1024 out, drawn with seed 0.

Prompts, lengths and their order of drawing are those of nano-vllm's benchmark, so that figures can be put side by side.
Later rounds keep all lengths and draw fresh token ids: a prefix cache never finds anything of an earlier round.
"""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """How much is drawn. The defaults are the headline's."""

    num_requests: int = 256
    shortest: int = 100
    longest: int = 1024
    highest_id: int = 10000


HEADLINE = Sizes()
QUICK = Sizes(num_requests=4, shortest=4, longest=12, highest_id=500)
TEMPERATURE = 0.6


def draw(number: int, sizes: Sizes = HEADLINE) -> tuple[list[list[int]], list[int]]:
    """Round `number` of the workload: prompts, and how many tokens each is to be given."""
    rng = random.Random(0)
    prompts = []
    for _ in range(sizes.num_requests):
        length = rng.randint(sizes.shortest, sizes.longest)
        prompts.append([rng.randint(0, sizes.highest_id) for _ in range(length)])
    max_tokens = [rng.randint(sizes.shortest, sizes.longest) for _ in range(sizes.num_requests)]
    if number:
        prompts = fresh_ids(prompts, seed=1000 + number, highest_id=sizes.highest_id)
    return prompts, max_tokens


def fresh_ids(prompts: list[list[int]], seed: int, highest_id: int) -> list[list[int]]:
    """Other token ids, the same lengths."""
    rng = random.Random(seed)
    return [[rng.randint(0, highest_id) for _ in prompt] for prompt in prompts]
