"""A stand-in for an engine's model that keeps what every step computed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.oracle import Generates


@dataclass
class Step:
    """One call of the model: T tokens, and for each layer what attention was given and what it gave."""

    input_ids: list[int]
    positions: list[int]
    hidden: Tensor | None = None  # [T, H]
    logits: Tensor | None = None  # [N, V] of the rows that were to be sampled
    q: list[Tensor] = field(default_factory=list)  # a layer each: [T, Hq, D]
    k: list[Tensor] = field(default_factory=list)  # [T, Hkv, D]
    v: list[Tensor] = field(default_factory=list)
    out: list[Tensor] = field(default_factory=list)  # [T, Hq, D]


class Recorder:
    """Wraps `engine.model`, through which every engine computes everything: `recorder = Recorder.on(engine)`."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.steps: list[Step] = []

    @classmethod
    def on(cls, engine: Generates) -> "Recorder":
        engine.model = cls(engine.model)
        return engine.model

    def __call__(self, input_ids: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        step = Step(input_ids.tolist(), positions.tolist())
        self.steps.append(step)

        def attend_and_keep(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = attend(layer, q, k, v)
            for kept, tensor in zip((step.q, step.k, step.v, step.out), (q, k, v, out), strict=True):
                kept.append(tensor.detach().float().cpu())
            return out

        step.hidden = self.model(input_ids, positions, attend_and_keep)
        return step.hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.logits(hidden)
        self.steps[-1].logits = logits.float().cpu()
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @torch.inference_mode()
    def logits_by_position(self, known: Sequence[int]) -> dict[int, Tensor]:
        """The scores [V] at every position that was computed, for a request that ran alone. `known`: its tokens.

        Also of the many that nobody samples from. Where a position was computed several times, the last one counts.
        """
        scores: dict[int, Tensor] = {}
        for step in self.steps:
            assert step.hidden is not None
            assert step.input_ids == [known[p] for p in step.positions], "not the tokens of this request"
            scores.update(zip(step.positions, self.model.logits(step.hidden).float().cpu(), strict=True))
        return scores


def record_alone(engine: Generates, prompt: list[int], params: Any) -> tuple[list[int], Recorder]:
    """Run one request with a recorder in place. Returns its output and what was recorded."""
    recorder = Recorder.on(engine)
    [output] = engine.generate([prompt], params)
    engine.model = recorder.model
    return output, recorder
