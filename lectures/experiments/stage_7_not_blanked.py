"""The story model on two ranks, here threads. Foreign tokens are blanked in the embedding, or they are not."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.checkpoint import read_config
from stages.stage_1_naive import attend_to_all
from stages.stage_7_tensor_parallel import VocabParallelEmbedding, best_of, load_share, winners
from tools.pictures.three_requests import STORY_MODEL, load_tokenizer

TEXT, RANKS, NEW = "Nell the fox had a red kite.", 2, 16


class Threads:
    """A group of ranks that are threads of one process: each lays its part on a desk, and takes all of them."""

    def __init__(self, rank: int, desk: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.device = rank, RANKS, torch.device("cpu")
        self.desk, self.barrier = desk, barrier

    def all_gather(self, x: Tensor) -> Tensor:
        self.desk[self.rank] = x
        self.barrier.wait(20)
        gathered = torch.stack(self.desk)
        self.barrier.wait(20)
        return gathered

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(self.all_gather(x).sum(0))


def careless(self: VocabParallelEmbedding, ids: Tensor) -> Tensor:
    rows = ids - self.group.rank * self.num_embeddings
    own = (rows >= 0) & (rows < self.num_embeddings)
    return self.group.all_reduce(F.embedding(rows.where(own, 0), self.weight))


def continued(tokens: list[int]) -> list[int]:
    """The greedy continuation, computed from the beginning for each token, as in stage 1."""
    path, desk, barrier = Path(STORY_MODEL), [None] * RANKS, threading.Barrier(RANKS)
    config = replace(read_config(path), dtype=torch.float32)

    @torch.inference_mode()
    def work(rank: int) -> list[int]:
        group: Any = Threads(rank, desk, barrier)
        model, known = load_share(path, config, group), list(tokens)
        for _ in range(NEW):
            hidden = model(torch.tensor(known), torch.arange(len(known)), attend_to_all)
            best = best_of(model.logits(hidden[-1:]), rank, config.vocab_size)
            known += winners(group.all_gather(best))
        return known[len(tokens) :]

    with ThreadPoolExecutor(RANKS) as pool:
        return next(pool.map(work, range(RANKS)))


tokenizer = load_tokenizer()
tokens = tokenizer.encode(TEXT).ids
print(f"{TEXT} …")
print("blanked:    ", tokenizer.decode(continued(tokens)).strip())
with patch.object(VocabParallelEmbedding, "forward", careless):
    print("not blanked:", tokenizer.decode(continued(tokens)).strip())
