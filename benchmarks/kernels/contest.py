"""Candidates for a row of the table of cards, the times they take, and which of them wins."""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

MARGIN = 0.03
SHOWN = 6  # of the candidates of a contest

Choice = tuple[tuple[str, Any], ...]  # what a row of the table gives: (("pairs", 16), ("columns", 64)); hashable
Call = Callable[[], object]
Timer = Callable[[Call, int], float]  # microseconds of a call, from so many calls in a row


@dataclass(frozen=True)
class Point:
    """Where candidates are compared: a shape and a number of tokens, in words; what is run there; and how often."""

    name: str
    run: Callable[[Choice], Call]
    calls: int = 10


@dataclass(frozen=True)
class Contest:
    """A row of the table that is to be filled. `when`: its conditions. `now`: what the engine takes there."""

    section: str
    when: dict[str, Any]
    points: Sequence[Point]
    candidates: Sequence[Choice]
    now: Choice


@dataclass(frozen=True)
class Outcome:
    contest: Contest
    chosen: Choice
    times: dict[Choice, list[float]]  # microseconds at each point; candidates that cannot run are not there

    def slowdown(self, choice: Choice) -> float:
        """Mean over the points of the time over the best time there."""
        best = [min(times) for times in zip(*self.times.values(), strict=True)]
        return sum(t / b for t, b in zip(self.times[choice], best, strict=True)) / len(best)


def decide(contest: Contest, times: dict[Choice, list[float]]) -> Outcome:
    """Raises ValueError if nothing could run, not even what the engine takes now."""
    if not times:
        raise ValueError(f"no candidate for {contest.section} {contest.when} runs on this card; please report it")
    outcome = Outcome(contest, contest.now, times)
    best = min(times, key=outcome.slowdown)
    if contest.now in times and outcome.slowdown(contest.now) <= (1 + MARGIN) * outcome.slowdown(best):
        return outcome
    return Outcome(contest, best, times)


def compile_all(contests: Iterable[Contest]) -> None:
    """Launch each candidate once, in as many threads as there are cores: the compiler leaves Python's lock."""

    def launch(point: Point, choice: Choice) -> None:
        try:
            with torch.inference_mode():
                point.run(choice)()
        except Exception:  # Triton raises its own for what does not fit; `measure` finds it missing
            return

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for contest in contests:
            for choice in contest.candidates:
                pool.submit(launch, contest.points[0], choice)


def measure(contest: Contest, timer: Timer) -> Outcome:
    times: dict[Choice, list[float]] = {}
    for choice in dict.fromkeys([contest.now, *contest.candidates]):
        try:
            times[choice] = [timer(point.run(choice), point.calls) for point in contest.points]
        except Exception:  # it does not fit on this card
            continue
    return decide(contest, times)


def say(outcome: Outcome) -> str:
    """What was chosen, what the present choice would have cost, and the candidates that came next."""
    contest, times = outcome.contest, outcome.times
    lines = [f"{contest.section} {contest.when}: microseconds at {', '.join(p.name for p in contest.points)}"]
    shown = sorted(times, key=outcome.slowdown)[:SHOWN]
    for choice in dict.fromkeys([*shown, *(c for c in (outcome.chosen, contest.now) if c in times)]):
        marks = " <- chosen" * (choice == outcome.chosen) + " <- now" * (choice == contest.now)
        at = " ".join(f"{time:8.1f}" for time in times[choice])
        lines.append(f"  {outcome.slowdown(choice):5.2f} {at}  {' '.join(f'{k}={v}' for k, v in choice)}{marks}")
    return "\n".join(lines)
