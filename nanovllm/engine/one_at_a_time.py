"""One call at a time: no thread and no callback enters an object in the middle of another call."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from threading import Lock, get_ident
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Calls:
    """Which thread is calling an object whose methods must not overlap."""

    def __init__(self) -> None:
        self.lock = Lock()  # held during a call of those that wait for each other
        self.threads: list[int] = []  # the first is in a call; any others are about to be refused
        self.owner: int | None = None  # the only thread that may call; None: any thread


class HasCalls(Protocol):
    calls: Calls


S = TypeVar("S", bound=HasCalls)
Method = Callable[Concatenate[S, P], R]


def one_at_a_time(*, wait: bool) -> Callable[[Method[S, P, R]], Method[S, P, R]]:
    """Decorate a method so that it never overlaps with another decorated one of the same object.

    wait: whether a call waits for the call of another thread, or raises RuntimeError at once: the same for all methods
    of an object. Two kinds of calls always raise RuntimeError: a call from inside a call (`on_event`, a progress bar),
    which would wait for itself, and a call from a thread that is not the object's owner.
    """

    def decorate(method: Method[S, P, R]) -> Method[S, P, R]:
        @wraps(method)
        def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
            calls, me, name = self.calls, get_ident(), method.__qualname__
            if calls.owner not in (None, me):
                raise RuntimeError(f"{name}: this engine belongs to an AsyncLLM's step loop; call the AsyncLLM")
            if me in calls.threads:
                raise RuntimeError(
                    f"{name} was called from inside another call of the same object, by on_event, a progress bar or a "
                    f"signal's handler; do that when the outer call has returned"
                )
            with calls.lock if wait else nullcontext():
                try:  # Ctrl-C may come anywhere in here, and leaves no thread in the list
                    calls.threads.append(me)
                    if calls.threads[0] != me:
                        raise RuntimeError(
                            f"{name} was called while another thread is in a call of the same object; use one thread, "
                            f"or LLM, whose calls wait for each other, or AsyncLLM, which serves many threads at once"
                        )
                    return method(self, *args, **kwargs)
                finally:
                    calls.threads.remove(me)

        return call

    return decorate
