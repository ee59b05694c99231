"""Who is given up, and who is left alone: the leader's watch over its ranks, on a clock that the test moves."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from nanovllm.workers import watchdog
from nanovllm.workers.watchdog import BEAT, SILENCE, StepStatus, Watchdog
from tests.stages.ranks import PROMPTLY

HOUR = round(3600 / BEAT)  # looks


class Store:
    """Holds the pulses of two ranks."""

    def __init__(self) -> None:
        self.pulses: Counter[str] = Counter()

    def add(self, key: str, amount: int) -> int:
        self.pulses[key] += amount
        return self.pulses[key]


def watch_for(
    looks: int, each: Callable[[int, StepStatus, Store], None], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[int, list[tuple[int, str]]]:
    """Call `each` before every look: how many there were, and who was lost."""
    store, step, lost = Store(), StepStatus(), list[tuple[int, str]]()
    watcher = Watchdog(store, 3, step, lambda *who: lost.append(who), **options)  # type: ignore[arg-type]
    seen = 0

    def sleep(seconds: float) -> None:
        nonlocal seen
        assert seconds == BEAT
        each(seen, step, store)
        seen += 1
        if seen == looks:
            watcher.over.set()

    monkeypatch.setattr(watchdog.time, "sleep", sleep)
    watcher.run()
    return seen, lost


def all_beat(store: Store, but: int = 0) -> None:
    for rank in (1, 2):
        if rank != but:
            watchdog.beat(store, rank)  # type: ignore[arg-type]


def test_a_rank_without_a_pulse_in_a_step_is_lost_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def each(look: int, step: StepStatus, store: Store) -> None:
        all_beat(store, but=2 if look >= 100 else 0)
        step.under_way = True

    looks, lost = watch_for(HOUR, each, monkeypatch)
    assert SILENCE <= (looks - 100) * BEAT < PROMPTLY - 1
    [(rank, why)] = lost
    assert rank == 2 and "rank 2 was stopped" in why


def test_who_has_nothing_to_do_or_loads_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for as long as single steps take: of those that are over, none was waited for."""

    def idle(look: int, step: StepStatus, store: Store) -> None: ...

    def loading(look: int, step: StepStatus, store: Store) -> None:
        step.under_way = step.loading = True

    def one_after_the_other(look: int, step: StepStatus, store: Store) -> None:
        step.under_way, step.number = True, look // 4

    for each in (idle, loading, one_after_the_other):
        assert watch_for(HOUR, each, monkeypatch, max_step=300) == (HOUR, [])


def test_a_long_step_of_ranks_that_live_has_a_limit_only_where_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def each(look: int, step: StepStatus, store: Store) -> None:
        all_beat(store)
        step.under_way = True

    assert watch_for(HOUR, each, monkeypatch) == (HOUR, [])
    looks, [(_, why)] = watch_for(HOUR, each, monkeypatch, max_step=300)
    assert 300 <= looks * BEAT < 302 and "longer than 300 s" in why
