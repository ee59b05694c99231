"""The ranks of one engine as the leader, rank 0, sees them: it tells all others what to do, and does the same itself.

Two kinds: processes that the leader starts (`spawned`), and those that torchrun has started (`launched`). What they
share is here: whatever goes wrong ends in an error at the leader, with the story of the rank that failed first.
"""

import pickle
import signal
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch

from nanovllm.distributed.group import Group, PeerLost
from nanovllm.distributed.watch import Step

GRACE = 2.0  # seconds for workers to say what happened, or to leave by themselves

# What makes a worker's part, in its process: called with its group, returns what is called with every message.
Make = Callable[[Group], Callable[[Any], object]]


class WorkerDied(PeerLost):
    """Why a step failed: the traceback of a worker, or the signal that killed it."""


class Team(ABC):
    """Closed by the user, by the garbage collector or at exit, whichever is first."""

    group: Group
    close: "weakref.finalize[..., Team]"  # ends all other ranks
    threads: int  # the leader's share of the CPU

    def __init__(self) -> None:
        self.step = Step()

    @abstractmethod
    def join(self) -> None:
        """Connect the group. Raises RuntimeError if a rank did not come so far."""

    def tell(self, message: object) -> None:
        """Send it to all workers. Raises PeerLost if one of them is gone."""
        self._send(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    @abstractmethod
    def _send(self, payload: bytes) -> None: ...

    @abstractmethod
    def cause_of(self, lost: PeerLost) -> str:
        """Why a step failed, in the words of the worker that failed first, where one did."""

    @contextmanager
    def in_step(self, *, loading: bool = False) -> Iterator[None]:
        """What all ranks do together, each with its share of the CPU's threads. Ctrl-C waits for the end of it, but not
        for that of `loading`, which may take minutes.

        Any failure in here ends all of them: in half a step the ranks would wait for each other, and take for an answer
        to one question what was meant for another. That of another rank becomes RuntimeError with its story.
        """
        threads = torch.get_num_threads()
        with nullcontext() if loading else ctrl_c_waits():
            if not self.close.alive:
                raise RuntimeError("this engine is closed: its ranks have ended; make a new one")
            torch.set_num_threads(min(threads, self.threads))
            self.step.number += 1
            self.step.loading, self.step.under_way = loading, True
            try:
                yield
                if not self.group.connected:
                    raise PeerLost(self.group.lost or "a worker died")
            except PeerLost as lost:
                cause = self.cause_of(lost)
                self.close()
                raise RuntimeError(f"a rank was lost, so this engine is closed: {cause}") from lost
            except BaseException:
                self.close()
                raise
            finally:
                self.step.under_way = False
                torch.set_num_threads(threads)


@contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """A Ctrl-C in here takes effect at the end; a second one at once.

    By a handler and not by a mask, which is of one thread only: the signal would come through another. Python handles
    signals in the main thread, so that all others are left alone anyway.
    """
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
