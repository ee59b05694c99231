"""The training loop of the embedded models: whole stories from position 0, padded on the right, batched by length.

A story is never cut and never sees another one, so a prompt at position 0 is what the model was trained on. Padding
on the right needs no mask: under causal attention no real token sees it, and its own losses are ignored.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import Qwen3ForCausalLM

from training.corpus import EOS_ID, Corpus

WIDTH_STEP: Final = 64  # widths of batches are multiples of this
IGNORED: Final = -100
WARMUP_STEPS: Final = 150
MEASURED_STEPS: Final = (20, 100)  # speed is measured between these steps, then the schedule is planned
CHECKPOINT_SECONDS: Final = 60.0
LOG_STEPS: Final = 100


@dataclass(frozen=True)
class Plan:
    """How long to train: at most `max_tokens` (real tokens, padding not counted) and about `seconds`."""

    max_tokens: int
    seconds: float
    batch_tokens: int
    learning_rate: float
    weight_decay: float
    seed: int
    compile: bool


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

    def forever(self, skip: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """The batches of all epochs, without the first `skip`."""
        number = 0
        while True:
            batches = self.epoch(number)
            yield from batches[skip:]
            skip = max(0, skip - len(batches))
            number += 1

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


def _optimizer(model: torch.nn.Module, plan: Plan) -> torch.optim.AdamW:
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": plan.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.95), fused=parameters[0].is_cuda)


def _rate(step: int, total_steps: int | None) -> float:
    """Linear warm-up, then a cosine down to 2% of the peak at `total_steps`."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    if total_steps is None:
        return warmup
    return warmup * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, step / total_steps))))


def _compile_layers(model: Qwen3ForCausalLM, batches: Batches) -> bool:
    """Compile the decoder layer (one graph for all layers and widths). Says so, loudly, where that is impossible."""
    try:
        for layer in model.model.layers:
            layer.compile(dynamic=True)
        for width, stories in batches.epoch(0)[:2]:
            loss_of(model, *batches.load(width, stories)).backward()
        model.zero_grad(set_to_none=True)
    except Exception:
        traceback.print_exc()
        print("WARNING: torch.compile failed (traceback above); training goes on WITHOUT it, more slowly", flush=True)
        for layer in model.model.layers:
            layer._compiled_call_impl = None
        model.zero_grad(set_to_none=True)
        return False
    return True


@dataclass
class Progress:
    """Where a training stands; kept in its checkpoint."""

    step: int = 0
    total_steps: int | None = None  # unknown until the speed has been measured
    spent: float = 0.0  # seconds, in earlier processes


class Log:
    """Mean loss and speed since the last line. Losses stay on the device until a line is due."""

    def __init__(self, device: torch.device) -> None:
        self._losses = torch.zeros((), device=device)
        self._restart()

    def _restart(self) -> None:
        self._losses.zero_()
        self._steps = self._tokens = 0
        self._since = time.monotonic()

    def add(self, loss: Tensor, tokens: int) -> None:
        self._losses += loss.detach()
        self._steps += 1
        self._tokens += tokens

    def line(self) -> str:
        """Raises RuntimeError if the loss is not finite any more."""
        mean = float(self._losses) / self._steps  # waits for the device
        if not math.isfinite(mean):
            raise RuntimeError(f"the loss is {mean}; lower the learning rate")
        speed = self._tokens / (time.monotonic() - self._since)
        self._restart()
        return f"loss {mean:.4f} {speed:,.0f} tokens/s"


def train(
    kind: str, model: Qwen3ForCausalLM, corpus: Corpus, plan: Plan, checkpoint: Path, resume: bool
) -> dict[str, Any]:
    """Train in place and return the figures. With `resume`, go on from `checkpoint`, if there is one."""
    device = next(model.parameters()).device
    batches = Batches(corpus, plan.batch_tokens, plan.seed, device)
    epoch_steps = len(batches.epoch(0))
    max_steps = math.ceil(plan.max_tokens / len(corpus.tokens) * epoch_steps)
    optimizer = _optimizer(model, plan)
    at = Progress(total_steps=max_steps if max_steps <= MEASURED_STEPS[1] else None)
    if resume and checkpoint.exists():
        at = _load(checkpoint, model, optimizer)
        print(f"{kind}: resumed at step {at.step} of {at.total_steps}", flush=True)
    started = saved = measured = time.monotonic()
    compiled = plan.compile and _compile_layers(model, batches)
    print(f"{kind}: {model.num_parameters():,} parameters, compiled: {compiled}", flush=True)

    model.train()
    lengths = corpus.lengths
    log = Log(device)
    for width, stories in batches.forever(skip=at.step):
        if at.step == at.total_steps:
            break
        rate = plan.learning_rate * _rate(at.step, at.total_steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(model, *batches.load(width, stories))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        at.step += 1
        log.add(loss, int(lengths[stories].sum()))

        if at.total_steps is None and at.step in MEASURED_STEPS:
            loss.item()  # waits for the device
            if at.step == MEASURED_STEPS[1]:
                seconds_left = plan.seconds - at.spent - (time.monotonic() - started)
                a_step = (time.monotonic() - measured) / (MEASURED_STEPS[1] - MEASURED_STEPS[0])
                at.total_steps = min(max_steps, at.step + max(1, int(seconds_left / a_step)))
                epochs = at.total_steps / epoch_steps
                print(f"{kind}: {a_step:.4f} s per step, {at.total_steps} steps, {epochs:.2f} epochs", flush=True)
            measured = time.monotonic()
        if at.step % LOG_STEPS == 0 or at.step == at.total_steps:
            now = time.monotonic()
            where = f"{kind}: step {at.step}/{at.total_steps} {at.spent + now - started:.0f} s"
            print(f"{where} lr {rate:.2e} {log.line()}", flush=True)
            if now - saved > CHECKPOINT_SECONDS or at.step == at.total_steps:
                saved = now
                _save(checkpoint, model, optimizer, Progress(at.step, at.total_steps, at.spent + now - started))
    seconds = at.spent + time.monotonic() - started
    tokens = round(at.step / epoch_steps * len(corpus.tokens))
    model.eval()
    return {
        "parameters": model.num_parameters(),
        "steps": at.step,
        "tokens": tokens,
        "epochs": round(at.step / epoch_steps, 2),
        "seconds": round(seconds, 1),
        "tokens_per_second": round(tokens / seconds),
        "compiled": compiled,
        "learning_rate": plan.learning_rate,
        "batch_tokens": plan.batch_tokens,
    }


def _save(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, at: Progress) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": asdict(at)}
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)  # a checkpoint is whole or not there


def _load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    state = torch.load(path, map_location=next(model.parameters()).device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return Progress(**state["progress"])
