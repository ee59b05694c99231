"""How a rank on a GPU lets go of the others, with a stand-in for NCCL that is as slow as the real one."""

import sys
import threading
from typing import Any

import pytest
import torch

from nanovllm.distributed.group import Group, PeerLost
from nanovllm.distributed.one_shot import OneShotAllReduce


class Nccl:
    """Ends the collective that waits as soon as it is aborted, and the abort when no graph is left."""

    def __init__(self) -> None:
        self.aborted, self.no_graphs, self.done = threading.Event(), threading.Event(), threading.Event()

    def abort(self) -> None:
        self.aborted.set()
        assert self.no_graphs.wait(10)
        self.done.set()


class Graph:
    def __init__(self, nccl: Nccl) -> None:
        self.nccl = nccl
        self.stream: Stream | None = None  # that it runs on

    def reset(self) -> None:
        assert self.stream is None or self.stream.query(), "while it runs nobody else could launch anything"
        assert self.nccl.aborted.wait(10), "a graph that waits for another rank goes only when its collective has ended"
        self.nccl.no_graphs.set()


@pytest.fixture
def nccl() -> Nccl:
    return Nccl()


@pytest.fixture
def group(nccl: Nccl) -> Group:
    group, graph = Group(0, 2, torch.device("cuda")), Graph(nccl)
    backend: Any = nccl
    recorded: Any = [graph]
    group._backend, group.recorded = backend, recorded
    return group


def test_whoever_watches_ends_the_wait_and_does_not_wait_for_graphs(group: Group, nccl: Nccl) -> None:
    watch = threading.Thread(target=group.give_up, args=("rank 1 died",))
    watch.start()
    watch.join(10)
    assert not watch.is_alive() and nccl.aborted.wait(10) and not nccl.done.is_set()
    assert not group.connected
    with pytest.raises(PeerLost, match="rank 1 died"):
        group.all_reduce(torch.zeros(1))
    group.close()
    assert nccl.done.is_set(), "the process may end now"


def test_closing_frees_the_graphs_and_waits_for_the_end(group: Group, nccl: Nccl) -> None:
    group.close()
    assert nccl.done.is_set() and not group.recorded and not group.connected
    group.close()  # again, for nothing


class Stream:
    """Empty from when somebody has let go of what waits in it."""

    def __init__(self, busy: bool = False) -> None:
        self.busy = busy

    def query(self) -> bool:
        return not self.busy


class Waiting(OneShotAllReduce):
    """Lets go of kernels once NCCL was told to, as long as more may come."""

    def __init__(self, nccl: Nccl, group: Group) -> None:
        self.nccl, self.group, self.ended = nccl, group, threading.Event()

    def release(self, stream: Any, over: threading.Event) -> None:
        assert self.nccl.aborted.wait(10)
        while not over.wait(0.001):
            stream.busy = False
        assert not self.group.recorded, "a graph that knows this memory is still there"
        self.ended.set()


@pytest.mark.parametrize("busy", [False, True])
def test_kernels_that_wait_in_shared_memory_are_let_go_meanwhile(group: Group, nccl: Nccl, busy: bool) -> None:
    """In the order of a stream either may stand before the other, so neither waits for the other, and graphs wait for
    both. A step that another thread was just launching may wait as well."""
    waiting, stream = Waiting(nccl, group), Stream(busy)
    any_stream: Any = stream
    group.one_shot, group._stream = waiting, any_stream
    group.recorded[0].stream = stream  # type: ignore[attr-defined]
    group.give_up("rank 1 died")
    assert (
        nccl.aborted.wait(10) and not waiting.ended.is_set() and not group.can_fuse_all_reduce((1, 8), torch.bfloat16)
    )
    stream.busy = busy
    group.close()
    assert waiting.ended.is_set() and nccl.done.is_set() and not stream.busy


def test_closing_while_the_watch_gives_up() -> None:
    """Both leave; whoever is second must not meet threads that were not started yet."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(200):
            group, nccl = Group(0, 2, torch.device("cuda")), Nccl()
            backend: Any = nccl
            group._backend = backend
            nccl.no_graphs.set()
            watch = threading.Thread(target=group.give_up, args=("rank 1 died",))
            watch.start()
            group.close()
            watch.join()
            group.close()
            assert nccl.done.is_set()
    finally:
        sys.setswitchinterval(interval)


class Voting(Group):
    """A rank on a GPU whose votes are seen."""

    def __init__(self, others: int) -> None:
        super().__init__(0, 2, torch.device("cuda"))
        self.others, self.votes = others, list[int]()

    def smallest(self, value: int) -> int:
        self.votes.append(value)
        return min(value, self.others if len(self.votes) > 1 else value)


@pytest.mark.parametrize(("own", "others", "asked"), [(1, 1, False), (1, 0, False), (0, 1, False), (0, 1, True)])
def test_all_share_memory_or_none(own: int, others: int, asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever fails tells the others first, for they wait for it."""

    class Made(OneShotAllReduce):
        def __init__(self, *arguments: Any) -> None:
            if not own:
                raise RuntimeError("no handles in this container")

        @staticmethod
        def wanted(rank: int, size: int, device: torch.device) -> tuple[int, bool]:
            return 1024, asked

    monkeypatch.setattr("nanovllm.distributed.group.OneShotAllReduce", Made)
    group, store = Voting(others), torch.distributed.HashStore()
    if asked:
        with pytest.raises(RuntimeError, match="no handles"):
            group._join_one_shot(store)
    else:
        assert (group._join_one_shot(store) is not None) == bool(own and others)
    assert group.votes == [1024, own]


def test_a_sum_with_a_norm_needs_the_others() -> None:
    """Another thread may have let go of them since the layer asked."""
    group, one = Group(0, 2, torch.device("cpu")), torch.ones(1, 8)
    assert not group.can_fuse_all_reduce(one.shape, one.dtype)
    with pytest.raises(PeerLost, match="not connected"):
        group.all_reduce_add_rms_norm(one, None, one[0], 1e-6)
