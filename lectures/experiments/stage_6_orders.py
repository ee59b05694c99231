"""How many orders Python gives to torch in a decode step of one sequence: one by one, and beside a replay."""

from collections import Counter

import torch
from torch import Tensor

from stages.stage_5_continuous_batching import ContinuousBatchingEngine
from stages.stage_6_cuda_graphs import CUDAGraphEngine
from tools.pictures.decode_profile import trace
from tools.pictures.three_requests import STORY_MODEL


class Silent:
    """A graph whose replay gives no order to anybody, and always the same token."""

    def replay(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int64)


def orders(engine: ContinuousBatchingEngine) -> Counter[str]:
    return Counter(name for _, name, *_ in trace(engine, batch=1))


before = orders(ContinuousBatchingEngine(STORY_MODEL))
engine = CUDAGraphEngine(STORY_MODEL, max_num_seqs=1)
engine.graphs = {1: Silent()}
left = orders(engine)
left["aten.zeros.default"] -= 1  # the silent graph's own
products = sum(n for name, n in before.items() if "linear" in name)
print(f"stage 5: {before.total()} orders for one token, and only {products} of them multiply by a weight")
print(f"stage 6: {left.total()} orders for one token, and a replay")
