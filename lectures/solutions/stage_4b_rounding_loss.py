"""Solution of exercise 4b. A beginning is known if an earlier prompt has it, so it is enough to keep the beginnings."""


def cached_tokens(prompts: list[list[int]], block_size: int) -> list[int]:
    # exercise 4b: tokens of each prompt that stage 4 would find
    known: set[tuple[int, ...]] = set()
    found = []
    for prompt in prompts:
        hit = 0
        while hit + block_size <= len(prompt) - 1 and tuple(prompt[: hit + block_size]) in known:
            hit += block_size
        found.append(hit)
        known |= {tuple(prompt[:end]) for end in range(block_size, len(prompt) + 1, block_size)}
    return found
    # end exercise


def lost_to_rounding(prompts: list[list[int]], block_size: int) -> float:
    # exercise 4b: the share that token by token would add
    by_token, by_block = (sum(cached_tokens(prompts, size)) for size in (1, block_size))
    return (by_token - by_block) / sum(map(len, prompts))
    # end exercise
