"""One step of stage 5 in all its parts, as JSON: two texts decode, a third begins. And the same step after a mistake.

The mistake: padding writes its key and value to slot 0 of the pool, in every step, as if the slot were nobody's.
"""

import json
from typing import Any

import torch
from torch import Tensor

from stages.core import SamplingParams, make_sequences
from stages.stage_5_continuous_batching import ContinuousBatchingEngine, Scheduled
from tools.pictures.three_requests import STORY_MODEL, load_tokenizer

TEXTS = [
    "On the edge of Willowbrook, under the roots of a beech tree, lived André the duck.",
    "In Winterbourne everybody knew Mabel.",
    "One golden day",
]
TOP = 5  # of the next tokens, the most probable ones
tokenizer = load_tokenizer()


def overwrite_slot_0(engine: ContinuousBatchingEngine) -> None:
    """What a row of padding leaves there: token 0 at position 0, which sees itself alone."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for blocks, new in ((engine.cache.k, k), (engine.cache.v, v)):
            blocks[layer].flatten(0, 1)[0] = new[0]
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

    engine.model(torch.tensor([0]), torch.tensor([0]), attend)


def part(s: Scheduled) -> dict[str, Any]:
    """The share of one request, before the step."""
    seq, end = s.seq, s.seq.num_computed + s.num_tokens
    texts = [tokenizer.decode([token]) for token in seq.token_ids]
    return {"computed": seq.num_computed, "end": end, "table": list(seq.block_table), "tokens": texts}


@torch.inference_mode()
def steps_until(num_steps: int, careless: bool) -> tuple[list[str], dict[str, Any]]:
    """The first text's words of so many steps, and the step after them, in which the third request begins."""
    engine = ContinuousBatchingEngine(STORY_MODEL, num_blocks=16, block_size=16)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    limits = {"vocab_size": engine.config.vocab_size, "max_model_len": engine.config.max_position_embeddings}
    first, second, third = make_sequences([tokenizer.encode(text).ids for text in TEXTS], params, **limits)
    found: dict[str, Any] = {}
    logits = engine.model.logits

    def kept(hidden: Tensor) -> Tensor:
        scores = logits(hidden)
        probabilities, ids = scores.softmax(dim=-1).topk(TOP)
        found["top"] = [
            [[tokenizer.decode([i]), round(p, 4)] for i, p in zip(*row, strict=True)]
            for row in zip(ids.tolist(), probabilities.tolist(), strict=True)
        ]
        return scores

    engine.model.logits = kept  # type: ignore[method-assign]
    for seq in (first, second):
        engine.scheduler.add(seq)
    for step in range(num_steps + 1):
        if step == num_steps:
            engine.scheduler.add(third)
        plan = engine.scheduler.schedule()
        found["parts"] = [part(s) for s in plan]
        token_ids = engine.run(plan)
        if careless:
            overwrite_slot_0(engine)
        engine.scheduler.commit(plan, token_ids, engine.eos_token_ids)
    return [tokenizer.decode([token]) for token in first.output], found


if __name__ == "__main__":
    right, wrong = (steps_until(55, careless)[0] for careless in (False, True))
    step = next(i for i, (a, b) in enumerate(zip(right, wrong, strict=True)) if a != b)
    runs = {name: steps_until(step, careless)[1] for name, careless in (("right", False), ("wrong", True))}
    print(json.dumps({"block_size": 16, "num_blocks": 16, **runs}, ensure_ascii=False))
