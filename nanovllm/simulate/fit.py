"""Finds the factors of `StepTime` from measured steps: least squares of the relative error, no factor below zero.

The relative error counts, since a step of a millisecond matters as much as one of a hundred: both are waited for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from nanovllm.simulate.step_shape import StepShape
from nanovllm.simulate.step_time import DEVICE_TERMS, HOST_TERMS, Recordings, StepTime

KNEES = (32, 64, 96, 128, 160, 192, 256, 384, 512, 1024)  # tokens; the best is taken
MOST_TURNS = 20
PAIRS, KEYS = (list(DEVICE_TERMS).index(name) for name in ("prompt_pair", "prompt_key"))
FEW_QUERIES = 512  # a guess to begin with: a chunk of so few tokens takes as long as walking through its context
# Weight of keeping factors small: it decides only between explanations that the steps cannot tell apart.
RIDGE = 0.03

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Observation:
    """Steps that were measured together: mostly one, or all of a run. `seconds` is what they took in sum."""

    name: str
    shapes: Sequence[StepShape]
    seconds: float


@dataclass(frozen=True)
class Residuals:
    """What a fit misses, in percent of what was measured."""

    worst: float
    median: float
    worst_of: str  # the name of that observation

    def as_json(self) -> dict[str, Any]:
        return {"worst_percent": self.worst, "median_percent": self.median, "worst_of": self.worst_of}


def non_negative_least_squares(a: Array, b: Array, ridge: float = 0.0) -> Array:
    """The x >= 0 that makes |a x - b| least (Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23).

    a: [N, K]; b: [N]. Columns of zeros get 0. ridge: weight of the lengths of the columns a_k x_k, which are then kept
    small as well.
    """
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a = np.concatenate([a / scale, ridge * np.eye(len(scale))])
    b = np.concatenate([b, np.zeros(len(scale))])
    x, active = np.zeros(a.shape[1]), np.zeros(a.shape[1], dtype=bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(a.T @ b).max(initial=0.0)))
    for _ in range(3 * len(x) + 10):
        gradient = a.T @ (b - a @ x)
        gradient[active] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        active[best] = True
        while True:
            candidate = np.zeros(len(x))
            candidate[active] = np.linalg.lstsq(a[:, active], b, rcond=None)[0]
            if candidate[active].min(initial=0.0) >= 0:
                break
            low = active & (candidate < 0)
            step = (x[low] / np.maximum(x[low] - candidate[low], 1e-300)).min()  # as far as nothing becomes negative
            x = x + step * (candidate - x)
            active &= x > 1e-14
            x[~active] = 0.0
        x = candidate
    return x / scale


def fit_device(
    observations: Sequence[Observation], recordings: Recordings, least: Mapping[str, float] | None = None
) -> tuple[StepTime, Residuals]:
    """The device's factors, knee and launches.

    least: what a factor cannot be below, because the card cannot read or multiply faster. Raises ValueError without
    observations.
    """
    if not observations:
        raise ValueError("a cost cannot be fitted to no steps at all: measure some")
    fits = [_fit_with_knee(observations, StepTime(least or {}, {}, knee, recordings=recordings)) for knee in KNEES]
    return min(fits, key=lambda found: _squares(observations, found[0]))


def _fit_with_knee(observations: Sequence[Observation], start: StepTime) -> tuple[StepTime, Residuals]:
    """Steps that are launched kernel by kernel take the longer of launching and computing, and attention of prompts
    the longer of all pairs and of walking through the longest context. Which of the two follows from the factors, so
    both are found in turns."""
    counts = [np.array([start.counts(shape) for shape in o.shapes]) for o in observations]  # [steps, terms] of each
    launched = [np.array([start.recordings.run(shape)[1] for shape in o.shapes]) for o in observations]
    tokens = [rows[:, 1] for rows in counts]
    shortest = min((n[eager].min() for eager, n in zip(launched, tokens, strict=True) if eager.any()), default=0)
    small = [eager & (n < 2 * shortest) for eager, n in zip(launched, tokens, strict=True)]
    walks = [rows[:, PAIRS] < FEW_QUERIES * rows[:, KEYS] for rows in counts]
    least = np.array([start.device.get(name, 0.0) for name in DEVICE_TERMS] + [0.0])
    found = start
    for _ in range(MOST_TURNS):
        rows = np.array(
            [
                np.append(longer_alone(c, w)[~s].sum(axis=0), s.sum()) / o.seconds
                for c, s, w, o in zip(counts, small, walks, observations, strict=True)
            ]
        )
        factors = least + non_negative_least_squares(rows, 1.0 - rows @ least, RIDGE)
        device = dict(zip(DEVICE_TERMS, map(float, factors[:-1]), strict=True))
        found = replace(start, device=device, launch=float(factors[-1]))
        now_walks = [c[:, KEYS] * factors[KEYS] > c[:, PAIRS] * factors[PAIRS] for c in counts]
        computing = [longer_alone(c, w) @ factors[:-1] for c, w in zip(counts, now_walks, strict=True)]
        now = [eager & (n < factors[-1]) for eager, n in zip(launched, computing, strict=True)]
        if all(np.array_equal(a, b) for a, b in zip([*now, *now_walks], [*small, *walks], strict=True)):
            break
        small, walks = now, now_walks
    return found, residuals(observations, found)


def longer_alone(counts: Array, walks: npt.NDArray[np.bool_]) -> Array:
    """The counts [steps, terms] of which only one of pairs and keys is left: the keys of steps that are walks."""
    found = counts.copy()
    found[walks, PAIRS] = 0
    found[~walks, KEYS] = 0
    return found


def _squares(observations: Sequence[Observation], found: StepTime) -> float:
    return sum((sum(map(found.device_seconds, o.shapes)) / o.seconds - 1) ** 2 for o in observations)


def residuals(observations: Sequence[Observation], found: StepTime) -> Residuals:
    """How far the device's time of each observation is from what was measured."""
    errors = {o.name: 100 * abs(sum(map(found.device_seconds, o.shapes)) / o.seconds - 1) for o in observations}
    worst = max(errors, key=errors.__getitem__)
    return Residuals(errors[worst], median(errors.values()), worst)


def fit_host(steps: Sequence[tuple[StepShape, float, float]]) -> dict[str, float]:
    """The host's factors. steps: shape, seconds of the host, and of the whole step, to which the error is relative."""
    rows = [
        [1.0, s.decodes + s.prompts, s.prompt_tokens, s.samples, float(s.prompts > 0), s.prompts] for s, _, _ in steps
    ]
    whole = np.array([seconds for _, _, seconds in steps])
    a, b = np.array(rows) / whole[:, None], np.array([seconds for _, seconds, _ in steps]) / whole
    return dict(zip(HOST_TERMS, map(float, non_negative_least_squares(a, b)), strict=True))


def fit_intake(added: Sequence[tuple[int, int, float, float]]) -> tuple[float, float]:
    """Seconds per request and per token of its prompt. added: requests, tokens of all their prompts, seconds that this
    took, and seconds of all that was measured with it, to which the error is relative."""
    whole = np.array([seconds for *_, seconds in added])
    a = np.array([[number, tokens] for number, tokens, _, _ in added]) / whole[:, None]
    request, token = non_negative_least_squares(a, np.array([seconds for _, _, seconds, _ in added]) / whole)
    return float(request), float(token)
