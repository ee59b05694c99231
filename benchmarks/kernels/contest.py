"""Candidates for a row of the table of cards, the times they take, and which of them wins."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

MARGIN = 0.04
SHOWN = 3  # of the candidates of a contest

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
    """A row of the table that is to be filled. `when`: its conditions. `now`: what the table gives there."""

    section: str
    when: dict[str, Any]
    points: Sequence[Point]
    candidates: Sequence[Choice]
    now: Choice


@dataclass(frozen=True)
class Outcome:
    contest: Contest
    times: dict[Choice, list[float]]  # microseconds at each point; candidates that cannot run are not there

    def slowdown(self, choice: Choice) -> float:
        """Mean over the points of the time over the best time there."""
        best = [min(times) for times in zip(*self.times.values(), strict=True)]
        return sum(t / b for t, b in zip(self.times[choice], best, strict=True)) / len(best)

    @property
    def chosen(self) -> Choice:
        """The one with the least slowdown. What the table gives keeps its place if it is nearly as fast: a border that
        noise has drawn helps nobody."""
        best, now = min(self.times, key=self.slowdown), self.contest.now
        near = now in self.times and self.slowdown(now) <= (1 + MARGIN) * self.slowdown(best)
        return now if near else best

    @property
    def cost_of_table(self) -> float | None:
        """The time with what the table gives over the time with what was chosen; None if the former cannot run."""
        now = self.contest.now
        return self.slowdown(now) / self.slowdown(self.chosen) if now in self.times else None

    def __str__(self) -> str:
        """What was chosen, what the table's choice would have cost, and the candidates that came next."""
        points = ", ".join(point.name for point in self.contest.points)
        lines = [f"{self.contest.section} {self.contest.when}, in microseconds: {points}"]
        now, first = self.contest.now, sorted(self.times, key=self.slowdown)[:SHOWN]
        for choice in dict.fromkeys([self.chosen, *first, *([now] if now in self.times else [])]):
            marks = " <- chosen" * (choice == self.chosen) + " <- table" * (choice == now)
            at = " ".join(f"{time:9.1f}" for time in self.times[choice])
            lines.append(f"  {self.slowdown(choice):5.2f} {at}  {' '.join(f'{k}={v}' for k, v in choice)}{marks}")
        return "\n".join(lines)


def compile_all(contests: Iterable[Contest]) -> None:
    """Have the kernels of all candidates compiled by many processes at once. What fails here fails in `measure`."""
    from nanovllm.kernels.precompile import compiled_together, num_processes

    with compiled_together(num_processes(1)):
        for contest in contests:
            for choice in {contest.now, *contest.candidates}:
                with suppress(Exception):
                    contest.points[0].run(choice)()


def measure(contest: Contest, timer: Timer) -> Outcome:
    """Raises RuntimeError if nothing can run, not even what the table gives."""
    times: dict[Choice, list[float]] = {}
    error: Exception | None = None
    for choice in dict.fromkeys([contest.now, *contest.candidates]):
        try:
            times[choice] = [timer(point.run(choice), point.calls) for point in contest.points]
        except Exception as raised:  # Triton raises its own for what does not fit on this card
            error = raised
    if not times:
        raise RuntimeError(f"nothing runs for {contest.section} {contest.when}: {error}")
    return Outcome(contest, times)
