"""Finds the factors of `StepTime` from measured steps: least squares of the relative error, no factor below zero.

The relative error counts, since a step of a millisecond matters as much as one of a hundred: both are waited for.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nanovllm.simulate.step_shape import StepShape
from nanovllm.simulate.step_time import DEVICE_TERMS, HOST_TERMS, Kind, Recordings, StepTime

LARGE = 512  # with so many tokens or more, products take longer than anything else that grows with tokens
GROWTH = 1.3  # from a row of the table to the next, at least
MOST_TURNS = 20
OUTLIER = 0.1  # an observation with a larger relative error counts less
# Weight of keeping factors small: it decides only between explanations that the steps cannot tell apart.
RIDGE = 0.003

Array = npt.NDArray[np.float64]


class Observation(NamedTuple):
    """A step that was measured."""

    name: str
    shape: StepShape
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
    observations: Sequence[Observation],
    recordings: Recordings,
    least: Mapping[str, float] | None = None,
    cache_bytes: float = math.inf,
) -> StepTime:
    """The device's table, factors and launches.

    least: what a factor cannot be below, because the card cannot read or multiply faster; "token" is the least slope of
    the table. A step counts less if it is an outlier. The time of a step is the longest of several sums (attention of
    prompts in two ways, or launching). Which sum is the longest follows from the factors, so the choice of sums and the
    factors are found in turns. If no step shares keys, "shared_key" is "own_key", or "decode_key" if "own_key" is 0.
    cache_bytes: of the device's cache, from which shared keys are read if they fit.

    Raises ValueError without observations.
    """
    if not observations:
        raise ValueError("a cost cannot be fitted to no steps at all: measure some")
    start, least = StepTime(((0, 0.0),), {}, {}, recordings=recordings, cache_bytes=cache_bytes), least or {}
    runs = [recordings.run(o.shape) for o in observations]
    sizes = rows_of_table([tokens for tokens, _ in runs])
    sums = [[[*hats(n, sizes), *counts, 0.0] for n, counts in start.counts(o.shape)] for o in observations]
    launched = [kind is Kind.LAUNCHED for _, kind in runs]
    shortest = min((n for (n, _), eager in zip(runs, launched, strict=True) if eager), default=0)
    chosen = []  # of the sums of each observation, a guess to begin with
    for of_one, (tokens, _), eager in zip(sums, runs, launched, strict=True):
        chosen.append(len(of_one) - 1 if tokens <= recordings.max_several else 0)
        if eager:
            of_one.append([0.0] * (len(of_one[0]) - 1) + [1.0])
            chosen[-1] = len(of_one) - 1 if tokens < 2 * shortest else 0
    lower = [0.0, *[least.get("token", 0.0) * (n >= LARGE) for n in sizes[:-1]]]
    lowest = np.array([*lower, *(least.get(name, 0.0) for name in DEVICE_TERMS), 0.0])
    arrays = [np.array(of_one) / o.seconds for of_one, o in zip(sums, observations, strict=True)]
    weights, factors = np.ones(len(arrays)), lowest
    for _ in range(MOST_TURNS):
        rows = np.array([of_one[place] for of_one, place in zip(arrays, chosen, strict=True)])
        wanted = (1.0 - rows @ lowest) * weights
        factors = lowest + non_negative_least_squares(rows * weights[:, None], wanted, RIDGE)
        found = [of_one @ factors for of_one in arrays]
        chosen = [int(np.argmax(seconds)) for seconds in found]
        off = np.array([abs(seconds.max() - 1.0) for seconds in found])
        weights = np.sqrt(np.minimum(1.0, OUTLIER / np.maximum(off, 1e-9)))
    heights = np.cumsum(factors[: len(sizes)] * [1.0, *np.diff(sizes)])
    table = tuple((n, float(height)) for n, height in zip(sizes, heights, strict=True))
    device = dict(zip(DEVICE_TERMS, map(float, factors[len(sizes) : -1]), strict=True))
    if not any(o.shape.shared_keys for o in observations):
        device["shared_key"] = device["own_key"] or device["decode_key"]
    device["shared_key"] = min(device["shared_key"], device["decode_key"])  # no cache is slower than the memory
    return replace(start, table=table, device=device, launch=float(factors[-1]))


def rows_of_table(tokens: Sequence[int]) -> list[int]:
    """The tokens of the table's rows: of all numbers that were measured, those that are not too close to each other."""
    found: list[int] = []
    for n in sorted(set(tokens)):
        if not found or n >= GROWTH * found[-1]:
            found.append(n)
    return found


def hats(tokens: int, sizes: Sequence[int]) -> list[float]:
    """What the seconds at `tokens` of a table consist of: the first row's seconds once, and then, for each of the
    following rows, so many times the growth per token before that row."""
    tokens = max(tokens, sizes[0])
    grown = [min(max(tokens - a, 0), b - a) for a, b in pairwise(sizes)]
    if grown:
        grown[-1] += max(0, tokens - sizes[-1])
    return [1.0, *map(float, grown)]


def residuals(observations: Sequence[Observation], found: StepTime) -> Residuals:
    """How far the device's time of each observation is from what was measured."""
    errors = {o.name: 100 * abs(found.device_seconds(o.shape) / o.seconds - 1) for o in observations}
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


def fit_counts(measured: Sequence[tuple[int, int, float, float]]) -> tuple[float, float]:
    """Seconds per unit of each of two counts.

    measured: both counts, seconds that they took, and seconds of all that was measured with them. The error is relative
    to the last.
    """
    whole = np.array([seconds for *_, seconds in measured])
    a = np.array([counts for *counts, _, _ in measured]) / whole[:, None]
    first, second = non_negative_least_squares(a, np.array([seconds for *_, seconds, _ in measured]) / whole)
    return float(first), float(second)
