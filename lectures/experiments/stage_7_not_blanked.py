"""The story model on two ranks, here threads. Foreign tokens are blanked in the embedding, or they are not."""

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
from tests.stages.ranks import Threads
from tools.pictures.three_requests import STORY_MODEL, load_tokenizer

TEXT, RANKS, NEW = "Nell the fox had a red kite.", 2, 16


def careless(self: VocabParallelEmbedding, ids: Tensor) -> Tensor:
    rows = ids - self.group.rank * self.num_embeddings
    own = (rows >= 0) & (rows < self.num_embeddings)
    return self.group.all_reduce(F.embedding(rows.where(own, 0), self.weight))


def continued(group: Any) -> list[int]:
    """The greedy continuation, computed from the beginning for each token, as in stage 1."""
    config = replace(read_config(Path(STORY_MODEL)), dtype=torch.float32)
    model, known = load_share(Path(STORY_MODEL), config, group), list(tokens)
    for _ in range(NEW):
        hidden = model(torch.tensor(known), torch.arange(len(known)), attend_to_all)
        known += winners(group.all_gather(best_of(model.logits(hidden[-1:]), group.rank, config.vocab_size)))
    return known[len(tokens) :]


tokenizer = load_tokenizer()
tokens = tokenizer.encode(TEXT).ids
print(f"{TEXT} …")
print("blanked:    ", tokenizer.decode(Threads.run(RANKS, continued)[0]).strip())
with patch.object(VocabParallelEmbedding, "forward", careless):
    print("not blanked:", tokenizer.decode(Threads.run(RANKS, continued)[0]).strip())
