"""Solution of exercise 2a. The output goes first: every step of it runs through the model for the whole batch."""

from stages.core import SamplingParams
from stages.stage_2_kv_cache import KVCacheEngine


class SortedEngine(KVCacheEngine):
    def generate(self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
        # exercise 2a: a better order, and the results in the order of the requests
        # instead: return super().generate(prompts, params)  # yours to mend
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            return super().generate(prompts, params)  # which says what is wrong
        each = params
        order = sorted(range(len(prompts)), key=lambda i: (each[i].max_tokens, len(prompts[i])))
        outputs = super().generate([prompts[i] for i in order], [each[i] for i in order])
        return [tokens for _, tokens in sorted(zip(order, outputs, strict=True))]
        # end exercise
