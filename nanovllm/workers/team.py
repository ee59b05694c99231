"""The ranks of one engine as the leader, rank 0, sees them. The leader tells the others what to do, and does the same.

The leader starts the other processes (`spawned_team`), or torchrun has started them (`launched_team`). Either way,
whatever goes wrong ends in an error at the leader, with the report of the rank that failed first. When a rank dies:

1. It is noticed. `watchdog` misses its heartbeat, or the leader sees the end of its process (`spawned_team._watch`).
2. Nobody waits for it any longer: `Group.leave` and `Group.give_up` end the collectives under way.
3. The leader's step ends in an error (`Team.in_step`, then `failed`), with the report that the rank has sent, if any.
4. `close` ends the other ranks: by their pipes (`spawned_team._release`) or connections (`Connections.lose`).
"""

import pickle
import signal
import threading
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch

from nanovllm.distributed.group import Group, PeerLost
from nanovllm.workers.watchdog import StepStatus

GRACE = 2.0  # seconds for workers to say what happened, or to leave by themselves

# Errors that the user can mend, where a rank cannot start. The leader raises such an error of a worker as its own.
MENDABLE: dict[str, type[Exception]] = {"ValueError": ValueError, "OutOfMemoryError": torch.OutOfMemoryError}

# Called in a worker's process with the worker's group; returns what is called with every message of the leader.
MakeWorker = Callable[[Group], Callable[[Any], object]]


class WorkerDied(PeerLost):
    """Why a step failed: the traceback of a worker, or the signal that killed it."""


class RankLost(RuntimeError, ConnectionError):
    """A rank is gone without a word. Being a ConnectionError, it costs a user of the command line one line."""


def failure_report(error: BaseException, rank: int) -> str:
    """What a worker sends before it ends: its traceback; and of a `MENDABLE` error name and text, each behind a NUL."""
    report = "".join(traceback.format_exception(error))
    kinds = [name for name, kind in MENDABLE.items() if isinstance(error, kind)]
    return "\0".join([report, kinds[0], f"rank {rank}: {error}"] if kinds else [report])


class Team(ABC):
    """Closed by the user, by the garbage collector or at exit, whichever is first."""

    group: Group
    close: "weakref.finalize[..., Team]"  # ends all other ranks
    threads: int  # the leader's share of the CPU

    def __init__(self) -> None:
        self.step = StepStatus()

    @abstractmethod
    def join(self) -> None:
        """Connect the group. Raises what `failed` says if a rank did not come so far."""

    def tell(self, message: object) -> None:
        """Send it to all workers. Raises PeerLost if one of them is gone."""
        self._send(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    @abstractmethod
    def _send(self, payload: bytes) -> None: ...

    @abstractmethod
    def cause_of(self, lost: PeerLost) -> str:
        """Why a step failed: the `failure_report` of the worker that failed first, or `lost` where none failed."""

    def failed(self, lost: PeerLost, what: str, *, starting: bool) -> Exception:
        """End all ranks. Returns what to raise: RuntimeError with the report of the rank that failed first; or, where a
        `MENDABLE` error kept that rank from starting, that error, with the report as a note."""
        report, *mistake = self.cause_of(lost).split("\0", 2)
        self.close()
        error: Exception = (RuntimeError if "\n" in report else RankLost)(f"{what}: {report}")
        if starting and mistake:
            kind, message = mistake
            note, error = str(error), MENDABLE[kind](message)
            error.add_note(note)
        return error

    def _check_connected(self) -> None:
        if not self.group.connected:
            raise PeerLost(self.group.lost or "a worker died")

    @contextmanager
    def in_step(self, *, loading: bool = False) -> Iterator[None]:
        """What all ranks do together, each with its share of the CPU's threads. Ctrl-C waits for the end of a step, but
        not for the end of `loading`, which may take minutes.

        Any failure in here ends all ranks: after half a step they would wait for each other. The failure of another
        rank becomes what `failed` says.
        """
        threads = torch.get_num_threads()
        with nullcontext() if loading else ctrl_c_waits():
            if not self.close.alive:
                raise RuntimeError("this engine is closed: its ranks have ended; make a new one")
            torch.set_num_threads(min(threads, self.threads))
            self.step.number += 1
            self.step.loading, self.step.under_way = loading, True
            try:
                if not loading:
                    self._check_connected()  # or a recorded step would be launched, and wait for ever
                yield
                self._check_connected()
            except PeerLost as lost:
                raise self.failed(lost, "a rank was lost, so this engine is closed", starting=loading) from lost
            except BaseException:
                self.close()
                raise
            finally:
                self.step.under_way = False
                torch.set_num_threads(threads)


@contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """A Ctrl-C in here takes effect at the end, and a second one at once. By a handler: a mask is of one thread only,
    and the signal would come through another. Python handles signals in the main thread, so others need none."""
    usual: Any = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return
    noted: list[FrameType | None] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(frame)
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if noted:
            usual(signal.SIGINT, noted[0])
