"""What the time of a step depends on: how many of everything, and never which."""

from collections import Counter
from typing import NamedTuple

from nanovllm.engine.plan import StepPlan
from nanovllm.engine.scheduler import Scheduler


class StepShape(NamedTuple):
    """Counts of a step. A step that has no less of anything takes no less time (`StepTime`)."""

    decodes: int = 0  # sequences that compute one known token and sample
    decode_keys: int = 0  # keys that those read: the sum of their contexts, less shared_keys
    prompts: int = 0  # sequences with a chunk of a prompt, or of what is computed anew after a preemption
    prompt_tokens: int = 0  # tokens of those chunks
    prompt_pairs: int = 0  # pairs of a query and a key that those tokens see
    samples: int = 0  # sequences that draw a token
    guesses: int = 0  # guessed tokens that are verified
    masked: int = 0  # sequences with structured outputs among those that draw
    prompt_keys: int = 0  # the longest context of those chunks: its keys are walked through one tile after the other
    shared_keys: int = 0  # that decodes read from blocks which another sequence of the step has read before them
    shared_beginnings: int = 0  # keys in those blocks, each counted once: what a device's cache would have to hold
    guess_keys: int = 0  # keys that guesses read, if each reads the context of its sequence once more


def shape_of(plan: StepPlan, scheduler: Scheduler | None = None) -> StepShape:
    """The counts of a plan. A last chunk of one token counts as a decode: it computes the same.

    scheduler: the one that made this plan, before it makes another. It knows how many keys are shared; without it 0.
    """
    # Nearly all are plain decodes: no guesses, and a pair for each key. So these are counted together.
    starts = [s[2] for s in plan.scheduled if s[3] == 1 and s[4]]
    decodes = samples = len(starts)
    decode_keys = sum(starts) + decodes
    prompts = prompt_tokens = prompt_pairs = prompt_keys = guesses = guess_keys = 0
    others = [s for s in plan.scheduled if s.num_tokens > 1 or not s.sample] if decodes < len(plan.scheduled) else []
    for _, _, start, num_tokens, sample, _, guessed in others:
        samples += sample
        known = num_tokens
        if guessed:
            known -= len(guessed)
            guesses += len(guessed)
        pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
        if sample and known == 1:
            decodes += 1
            decode_keys += start + 1
            guess_keys += pairs - start - 1
        else:
            prompts += 1
            prompt_tokens += known
            prompt_pairs += pairs
            prompt_keys = max(prompt_keys, start + num_tokens)
    shared_keys = shared_beginnings = 0
    if scheduler is not None and decodes > 1:
        # Running sequences that do not decode in this step share keys as well, which do not count. The number is exact
        # if all share one beginning.
        shared_keys = num_shared(scheduler) * (decodes - 1) // (len(scheduler.running) - 1)
        shared_keys = min(decode_keys, shared_keys)
        decode_keys -= shared_keys
        if shared_keys:
            shared_beginnings = num_in_beginnings(scheduler)
    masked = len(plan.masked)
    return StepShape(
        *(decodes, decode_keys, prompts, prompt_tokens, prompt_pairs, samples, guesses, masked),
        *(prompt_keys, shared_keys, shared_beginnings, guess_keys),
    )


def num_shared(scheduler: Scheduler) -> int:
    """Keys that running sequences have in common: all in their block tables, less those in the blocks in use."""
    blocks = scheduler.blocks
    held = sum([len(seq.block_table) for seq in scheduler.running])
    return (held - blocks.num_blocks + blocks.num_free) * blocks.block_size


def num_in_beginnings(scheduler: Scheduler) -> int:
    """Keys in the blocks that running sequences share, each block counted once. Sequences whose first block is the same
    are taken to share as much as others do on average."""
    sharing = [n for n in Counter([s.block_table[0] for s in scheduler.running if s.block_table]).values() if n > 1]
    repeated = sum(sharing) - len(sharing)
    return num_shared(scheduler) * len(sharing) // repeated if repeated else 0
