"""A vocabulary of five tokens on two ranks of three columns each: who wins, with the padding masked and without."""

import torch
import torch.nn.functional as F

from stages.stage_7_tensor_parallel import best_of, winners

LOGITS = torch.tensor([[-3.1, -0.4, -2.0, -5.2, -1.3]])  # of tokens 0 to 4
COLUMNS = 3  # of a rank; the last one of rank 1 is nobody's

parts = F.pad(LOGITS, (0, 1)).split(COLUMNS, dim=1)
for rank, part in enumerate(parts):
    print(f"rank {rank}: " + "  ".join(f"{logit:4.1f}" for logit in part[0].tolist()))
for name, vocab_size in (("with the mask", LOGITS.shape[1]), ("without it", 2 * COLUMNS)):  # 2 * COLUMNS masks none
    best = torch.stack([best_of(part, rank, vocab_size) for rank, part in enumerate(parts)])
    print(f"{name + ':':15} token {winners(best)[0]} wins")
