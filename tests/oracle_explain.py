"""Why is a greedy token wrong? The request is run again, alone, warm and in its batch, and each step is taken apart.

wrong alone                          a step's ids and positions are not the sequence's       -> position
                                     attention's output is not causal attention over the
                                     keys and values that it was given so far,
                                         but over some keys too many or too few              -> mask
                                         nor anything near it: they are misplaced or stale   -> cache
                                     attention is right, the logits are not                  -> model
                                     the logits are right, the token is not                  -> sampling
right alone, wrong on a warm engine                                                          -> cache
right alone and warm, wrong in its batch                                                     -> batch composition
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.oracle import Generates, MakeEngine, Mismatch, Truth, find_mismatch, tolerance, truth
from tests.oracle_record import Recorder, Step, record_alone

ATTENTION_TOLERANCE = 1e-3  # relative; faults are of the order of one, and errors grow from layer to layer


@dataclass(frozen=True)
class Explanation:
    request: int
    mismatch: Mismatch | None  # in the run that was taken apart
    layer: int | None  # the first whose attention output is not HF's
    suspect: str
    detail: str

    def __str__(self) -> str:
        layer = "every layer's attention output agrees" if self.layer is None else f"first seen in layer {self.layer}"
        return f"suspect: {self.suspect} ({self.detail}; {layer})\n  in that run: {self.mismatch or 'all tokens right'}"


@dataclass
class Run:
    """One request in one recorded run, and what HF says about it."""

    judge: Truth
    prompt: list[int]
    output: list[int]
    recorder: Recorder
    mismatch: Mismatch

    def guilty_steps(self) -> list[Step]:
        """The steps up to the one that chose the first wrong token, for a request that ran alone."""
        steps, rows = [], 0
        for step in self.recorder.steps:
            steps.append(step)
            rows += 0 if step.logits is None else len(step.logits)
            if rows > self.mismatch.index:
                break
        return steps

    def known(self) -> list[int]:
        """The tokens that are the sequence's own and HF's: the prompt and the output before the first wrong token."""
        return self.prompt + self.output[: self.mismatch.index]

    def first_layer(self) -> int | None:
        """The first layer with a token of this sequence for which no computed row has HF's attention output."""
        known = self.known()
        theirs = self.judge.attention_outputs(known)  # [layers, T, Hq * D]
        for layer, expected in enumerate(theirs):
            for step in self.recorder.steps:
                if len(step.out) <= layer:
                    continue
                ours = step.out[layer].flatten(1)  # [T, Hq * D]
                right: dict[int, bool] = {}
                for row, (token, p) in enumerate(zip(step.input_ids, step.positions, strict=True)):
                    if p < len(known) and known[p] == token:
                        right[p] = right.get(p, False) or close(ours[row], expected[p])
                if not all(right.values()):
                    return layer
        return None


def close(ours: Tensor, expected: Tensor) -> bool:
    """NaN is not close to anything."""
    limit = ATTENTION_TOLERANCE * max(1.0, expected.abs().max().item())
    return bool(((ours - expected).abs() <= limit).all())


def explain(
    make_engine: MakeEngine,
    path: Path,
    prompts: list[list[int]],
    params: Sequence[Any],
    index: int,
    *,
    history: Sequence[list[list[int]]] = (),
) -> Explanation:
    """Why the greedy request `index` of this batch is wrong on an engine like `make_engine()`.

    `history`: prompts of earlier calls of `generate`, which a prefix cache may remember.
    """
    judge, prompt, p = truth(path), prompts[index], params[index]

    def rerun(engine: Generates) -> Run | None:
        output, recorder = record_alone(engine, prompt, p)
        mismatch = find_mismatch(judge, prompt, output, p)
        return Run(judge, prompt, output, recorder, mismatch) if mismatch else None

    if run := rerun(make_engine()):
        return Explanation(index, run.mismatch, *analyse(run))

    warm = make_engine()
    for earlier in history:
        warm.generate(earlier, p)
    for other in prompts:
        warm.generate([other], p)
    if run := rerun(warm):
        detail = "right on a fresh engine, wrong on one that served other requests before"
        return Explanation(index, run.mismatch, run.first_layer(), "cache", detail)

    engine = make_engine()
    recorder = Recorder.on(engine)
    output = engine.generate(prompts, list(params))[index]
    if mismatch := find_mismatch(judge, prompt, output, p):
        run = Run(judge, prompt, output, recorder, mismatch)
        detail = "right alone and on a warm engine, wrong among these neighbours"
        return Explanation(index, mismatch, run.first_layer(), "batch composition", detail)
    return Explanation(index, None, None, "not reproduced", "right when run again, alone, warm and in its batch")


def analyse(run: Run) -> tuple[int | None, str, str]:
    """First layer, suspect and detail for a request that is wrong all by itself on a fresh engine."""
    steps = run.guilty_steps()
    expected = run.judge.choices(run.prompt, [*run.known()[len(run.prompt) :], 0])[-1]  # [V]
    rows = [row for step in steps if step.logits is not None for row in step.logits]
    if len(rows) > run.mismatch.index and matches(rows[run.mismatch.index], expected):
        return None, "sampling", "the logits are HF's, so the token was chosen, or the output ended, wrongly"
    if run.mismatch.index >= len(rows):
        return None, "sampling", "the output goes on or ends though no logits say so"
    if detail := wrong_position(run, steps):
        return 0, "position", detail
    if found := wrong_attention(steps):
        suspect, detail = found
        return run.first_layer(), suspect, detail
    hidden = steps[-1].hidden
    assert hidden is not None
    with torch.inference_mode():
        if matches(run.recorder.model.logits(hidden[-1:]).float().cpu()[0], expected):
            return None, "sampling", "the last token's hidden state is right, the logits came from another token's"
    return run.first_layer(), "model", "positions and attention are right: look at the weights and the other layers"


def matches(logits: Tensor, expected: Tensor) -> bool:
    return bool(((logits - expected).abs() <= tolerance(expected)).all())


def wrong_position(run: Run, steps: list[Step]) -> str | None:
    """What is wrong with the token ids and positions of a request that ran alone, if anything."""
    tokens = list(run.prompt)
    computed = 0
    for number, step in enumerate(steps):
        ids, positions = step.input_ids, step.positions
        where = f"step {number}: positions {shortened(positions)}"
        if positions != list(range(positions[0], positions[0] + len(positions))):
            return f"{where} are not consecutive"
        if positions[0] > computed:
            return f"{where}, but only {computed} tokens were computed before"
        if positions[-1] >= len(tokens) or ids != tokens[positions[0] : positions[-1] + 1]:
            return f"{where} were given the tokens {shortened(ids)}, which do not stand there"
        computed = positions[-1] + 1
        if step.logits is not None and len(step.logits):
            if computed != len(tokens):
                return f"{where} do not reach the last of {len(tokens)} tokens, yet one was sampled"
            tokens += run.output[len(tokens) - len(run.prompt) :][:1]
    return None


def shortened(values: list[int]) -> str:
    return str(values) if len(values) <= 6 else f"[{values[0]}, {values[1]}, ... {values[-1]}]"


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """q [T, Hq, D], k and v [C, Hkv, D], visible [T, C] -> [T, Hq, D]; a row that sees nothing is NaN."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)  # [C, Hq, D]
    scores = torch.einsum("thd,chd->htc", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("htc,chd->thd", weights, v)


@torch.inference_mode()
def wrong_attention(steps: list[Step]) -> tuple[str, str] | None:
    """Compare each step's attention with causal attention over the keys and values that were handed to it so far."""
    keys: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by layer and position
    for number, step in enumerate(steps):
        for layer, (q, k, v, out) in enumerate(zip(step.q, step.k, step.v, step.out, strict=True)):
            keys.update({(layer, p): (k[row], v[row]) for row, p in enumerate(step.positions)})
            context = step.positions[-1] + 1
            all_k, all_v = (torch.stack([keys[layer, p][i] for p in range(context)]) for i in (0, 1))
            # One empty slot more, as a mask that ends too late would see behind the last token
            all_k, all_v = (torch.cat((x, torch.zeros_like(x[:1]))) for x in (all_k, all_v))  # [C + 1, Hkv, D]
            column, own = torch.arange(context + 1), torch.tensor(step.positions)[:, None]
            expected = attention(q, all_k, all_v, column <= own)
            bad = [row for row in range(len(q)) if not close(out[row], expected[row])]
            if not bad:
                continue
            where = f"step {number}, layer {layer}, position {step.positions[bad[0]]}"
            masks = {
                "one key too few is seen, the token's own": column < own,
                "one key too many is seen, of the token after": column <= own + 1,
                "the first key is not seen": (column <= own) & (column > 0),
                "all keys are seen, later ones too": (column < context).expand(len(q), -1),
            }
            for name, mask in masks.items():
                # A row that sees no key at all has no defined output to compare
                rows = [row for row in bad if mask[row].any()]
                candidate = attention(q, all_k, all_v, mask)
                if rows and all(close(out[row], candidate[row]) for row in rows):
                    return "mask", f"{where}: {name}"
            return "cache", f"{where}: not attention over the keys and values computed so far, under any near mask"
    return None
