"""How the leader notices that a rank for which it waits does not go on.

Dead: the process has ended. The leader hears it from the operating system, at once.
Stopped: the process exists but does not run (a signal, a debugger, a hanging machine). A thread of every rank shows a
    pulse, whatever the step does. A rank that shows none for `SILENCE` during a step is given up, but not while it
    loads, since a slow disk may stop its threads. Time is counted in looks of the leader, so that Ctrl-Z does no harm.
Slow: nobody can tell a rank that computes for long from a rank that never ends. So ranks wait for each other for
    `group.TIMEOUT` only: with gloo at each sum; on GPUs, where sums are queued, at each step.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection

import torch.distributed as dist

BEAT = 0.5  # seconds
SILENCE = 3.0  # seconds


@dataclass
class StepStatus:
    """The step of the leader, as the watchdog sees it from its own thread. Set by `Team.in_step`."""

    number: int = 0
    under_way: bool = False
    loading: bool = False


def beat(store: dist.Store, rank: int) -> None:
    """Show a pulse."""
    store.add(f"pulse {rank}", 1)


@dataclass
class Watchdog:
    """Looks after ranks 1 to `size` - 1, in a thread that ends with the first process of `sentinels`, or with `over`.

    lose: called with the first rank that is given up, and the reason.
    """

    store: dist.Store
    size: int
    step: StepStatus
    lose: Callable[[int, str], None]
    sentinels: Sequence[int] = ()
    max_step: float = float("inf")  # seconds
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        pulses: dict[int, int] = {}
        silent: Counter[int] = Counter()  # looks in a row
        number = looks = 0
        while not self.over.is_set() and not self._someone_has_ended():
            step = self.step
            looks = looks + 1 if step.under_way and step.number == number else 0
            number = step.number
            for rank in range(1, self.size):
                pulse = self.store.add(f"pulse {rank}", 0)
                quiet = looks and not step.loading and pulse == pulses.get(rank)
                silent[rank] = silent[rank] + 1 if quiet else 0
                pulses[rank] = pulse
                if silent[rank] * BEAT >= SILENCE:
                    self.lose(rank, f"rank {rank} was stopped: it has shown no sign of life for {SILENCE:g} s")
                    return
            if looks * BEAT >= self.max_step and not step.loading:
                self.lose(1, f"a step took longer than {self.max_step:g} s")
                return

    def _someone_has_ended(self) -> bool:
        if self.sentinels:
            return bool(connection.wait(self.sentinels, BEAT))
        time.sleep(BEAT)
        return False
