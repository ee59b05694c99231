"""The training loop of the embedded models: whole stories from position 0, padded on the right, batched by length.

A story is never cut and never sees another one, so a prompt at position 0 is what the model was trained on. Padding
on the right needs no mask: under causal attention no real token sees it, and its own losses are ignored.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from training.corpus import EOS_ID, Corpus
from training.experts import balancing_loss, compute_all_experts

WIDTH_STEP: Final = 64  # widths of batches are multiples of this
IGNORED: Final = -100
WARMUP_STEPS: Final = 150
LAST_RATE: Final = 0.02  # of the peak
WEIGHT_DECAY: Final = 0.1
LOG_STEPS: Final = 100
KEEP_SECONDS: Final = 60


@dataclass(frozen=True)
class Plan:
    """How long to train. The number of steps is fixed, so the schedule is the same on every machine."""

    steps: int
    batch_tokens: int
    learning_rate: float
    seed: int


class Batches:
    """Every story once an epoch, in batches of about equal length; the order depends on the seed and the epoch only."""

    def __init__(self, corpus: Corpus, batch_tokens: int, seed: int, device: torch.device) -> None:
        self.tokens = torch.from_numpy(corpus.tokens.astype(np.int32)).to(device)  # [T]
        self.starts = torch.from_numpy(corpus.offsets[:-1]).to(device)  # [S]
        self.lengths = torch.from_numpy(corpus.lengths).to(device)  # [S]
        self._widths = -(-(corpus.lengths - 1) // WIDTH_STEP) * WIDTH_STEP  # the last token is only a label
        self._batch_tokens = batch_tokens
        self._seed = seed

    def epoch(self, number: int) -> list[tuple[int, NDArray[np.int64]]]:
        """(width, stories) of each batch; smaller last batches of a width are kept."""
        rng = np.random.default_rng((self._seed, number))
        batches: list[tuple[int, NDArray[np.int64]]] = []
        for width in np.unique(self._widths).tolist():
            stories = rng.permutation(np.flatnonzero(self._widths == width))
            rows = max(1, self._batch_tokens // width)
            batches += [(width, stories[first : first + rows]) for first in range(0, len(stories), rows)]
        return [batches[index] for index in rng.permutation(len(batches))]

    def forever(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """The batches of all epochs."""
        for number in itertools.count():
            yield from self.epoch(number)

    def load(self, width: int, stories: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Inputs and labels, [B, width] each."""
        rows = torch.from_numpy(stories).to(self.starts.device)
        steps = torch.arange(width + 1, device=rows.device)
        real = steps[None, :] < self.lengths[rows, None]  # [B, width + 1]
        where = (self.starts[rows, None] + steps).clamp(max=len(self.tokens) - 1)
        ids = torch.where(real, self.tokens[where].long(), EOS_ID)
        return ids[:, :-1], torch.where(real, ids, IGNORED)[:, 1:]


def loss_of(model: torch.nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy in nats over the real tokens; bf16 on a GPU, fp32 on a CPU (few CPUs are fast in bf16)."""
    with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=inputs.is_cuda):
        logits = model(input_ids=inputs, use_cache=False).logits  # [B, width, V]
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)


def _optimizer(model: torch.nn.Module, learning_rate: float) -> torch.optim.AdamW:
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=parameters[0].is_cuda)


def rate(step: int, total_steps: int) -> float:
    """The share of the peak's learning rate: a linear warm-up times a cosine down to LAST_RATE at `total_steps`."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    return warmup * (LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * step / total_steps)))


def train(
    kind: str, model: Any, corpus: Corpus, validation: Corpus, plan: Plan, keep: Callable[[], None]
) -> dict[str, Any]:
    """Train in place and return the figures. Raises RuntimeError if the loss is not finite any more.

    keep: saves the model as it is. It is called every minute and at the end, so that a run that is cut leaves one.
    """
    device = next(model.parameters()).device
    batches = Batches(corpus, plan.batch_tokens, plan.seed, device)
    held_out = Batches(validation, plan.batch_tokens, plan.seed, device)
    optimizer = _optimizer(model, plan.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, plan.steps))
    compute_all_experts(model)
    if device.type == "cuda":  # one graph for all layers and widths
        for layer in model.model.layers:
            layer.compile(dynamic=True)
    started = kept = time.monotonic()
    print(f"{kind}: {model.num_parameters():,} parameters", flush=True)

    model.train()
    tokens, recent = 0, torch.zeros((), device=device)  # losses stay on the device until a line is due
    for step, (width, stories) in enumerate(itertools.islice(batches.forever(), plan.steps), start=1):
        inputs, labels = batches.load(width, stories)
        loss = loss_of(model, inputs, labels)
        (loss + balancing_loss(model, labels != IGNORED)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        tokens += int(corpus.lengths[stories].sum())
        recent += loss.detach()
        if step % LOG_STEPS == 0 or step == plan.steps:
            mean = float(recent) / ((step - 1) % LOG_STEPS + 1)  # waits for the device
            if not math.isfinite(mean):
                raise RuntimeError(f"the loss is {mean}; lower the learning rate")
            recent.zero_()
            speed = tokens / (time.monotonic() - started)
            print(f"{kind}: step {step}/{plan.steps}, loss {mean:.4f}, {speed:,.0f} tokens/s", flush=True)
        if time.monotonic() - kept >= KEEP_SECONDS or step == plan.steps:
            keep()
            print(
                f"{kind}: step {step} is saved, loss {mean_loss(model, held_out):.4f} on held-out stories", flush=True
            )
            kept = time.monotonic()
    seconds = time.monotonic() - started
    model.eval()
    return {
        "parameters": model.num_parameters(),
        "steps": plan.steps,
        "tokens": tokens,
        "epochs": round(plan.steps / len(batches.epoch(0)), 2),
        "seconds": round(seconds, 1),
        "tokens_per_second": round(tokens / seconds),
        "learning_rate": plan.learning_rate,
        "batch_tokens": plan.batch_tokens,
    }


def mean_loss(model: Any, batches: Batches) -> float:
    """Mean loss of `batches` in the precision of training; with gradients, for which a compiled layer has its code."""
    sums = torch.zeros(2, device=batches.starts.device)
    for width, stories in batches.epoch(0):
        inputs, labels = batches.load(width, stories)
        real = (labels != IGNORED).sum()
        sums += torch.stack([loss_of(model, inputs, labels).detach() * real, real])
    return float(sums[0] / sums[1])
