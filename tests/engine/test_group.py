"""How a rank on a GPU lets go of the others, with a stand-in for NCCL that is as slow as the real one."""

import threading
from typing import Any

import pytest
import torch

from nanovllm.distributed.group import Group, PeerLost
from nanovllm.distributed.one_shot import OneShot


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

    def reset(self) -> None:
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


def test_kernels_that_wait_in_shared_memory_are_let_go_meanwhile(group: Group, nccl: Nccl) -> None:
    """In the order of a stream either may stand before the other, so neither waits for the other."""
    released = threading.Event()

    class Waiting(OneShot):
        def release(self, stream: Any) -> None:
            assert stream == "where steps run" and nccl.aborted.wait(10)
            released.set()

    stream: Any = "where steps run"
    group.one_shot, group._stream = Waiting.__new__(Waiting), stream
    group.give_up("rank 1 died")
    assert released.wait(10) and not nccl.done.is_set() and not group.sums_at_once(1)
    group.close()
    assert nccl.done.is_set()
