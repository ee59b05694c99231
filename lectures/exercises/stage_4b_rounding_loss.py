"""Exercise 4b: What do whole blocks lose? Estimate it before you build anything.

A prefix cache shares full blocks only. Two prompts that agree in 50 tokens share 48 with blocks of 16, and none with
blocks of 64. Sharing token by token would find all 50, but somebody would have to build it, and to copy a block that
two sequences go on writing differently. Is that worth it? Count first.

Requests come one after the other, each is served before the next one comes, and memory is never short. Write

    cached_tokens(prompts, block_size) -> list[int]

how many tokens of each prompt are found in the cache, as stage 4 finds them: full blocks, and at least one token is
always computed. With block_size=1 the same function says what sharing token by token would find. Outputs are not in the
cache here: every request asks for one token, which is never fed back.

    lost_to_rounding(prompts, block_size) -> float

the share of all prompt tokens (0 to 1) that would be found token by token and is not found with whole blocks.

Check: .venv/bin/python -m tools.lectures.lecture_exercises 4b    (it compares with what stage 4 really finds)
"""


def cached_tokens(prompts: list[list[int]], block_size: int) -> list[int]:
    raise NotImplementedError("exercise 4b: tokens of each prompt that stage 4 would find")


def lost_to_rounding(prompts: list[list[int]], block_size: int) -> float:
    raise NotImplementedError("exercise 4b: the share that token by token would add")
