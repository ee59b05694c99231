"""Exercise 2b: Let every token see only the last `window` tokens.

Some models (Mistral's first, Gemma's every other layer) attend to a window: token p sees itself and the window - 1
tokens before it. Far memory is lost to that layer, and the cache need not keep it.

Write `forward` of `WindowedEngine`: stage 2's, with another mask. A query at position p sees the keys at p - window + 1
to p, in its own row. Prefill and decode go through the same function, so one line is enough.

Then think: with a window of 64, how many columns does the cache really need? (You need not build it: it is a ring, and
position p lies in column p % 64.)

Check: .venv/bin/python -m tools.lectures.lecture_exercises 2b
"""

from typing import Any

from torch import Tensor

from stages.stage_2_kv_cache import KVCache, KVCacheEngine


class WindowedEngine(KVCacheEngine):
    def __init__(self, model: str, *, window: int, **options: Any) -> None:
        super().__init__(model, **options)
        self.window = window

    def forward(self, cache: KVCache, input_ids: Tensor, positions: Tensor) -> Tensor:
        return super().forward(cache, input_ids, positions)  # yours to write: stage 2's, with another mask
