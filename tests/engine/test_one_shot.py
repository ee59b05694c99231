"""Sums over symmetric memory: who gets them, and on GPUs that they are NCCL's, in and out of a graph."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm import LLM, SamplingParams
from nanovllm.distributed.group import Group
from nanovllm.distributed.one_shot import (
    SWITCH,
    OneShotAllReduce,
    RendezvousStore,
    default_bytes,
    link_has_atomics,
    reaches,
)
from nanovllm.layers.norm import rms_norm
from nanovllm.workers.spawned_team import SpawnedTeam
from tests import oracle
from tests.engine.ranks import STORY_MODEL, executor_of, generate, tokens
from tests.stages.requests import story_prompts

CPU = torch.device("cpu")
GPUS = pytest.mark.parametrize("size", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (2, 4)])
MOST = 1 << 16
LONG = timedelta(seconds=15)


def with_buffer(max_bytes: int) -> OneShotAllReduce:
    """Without the others, but able to say what it would take."""
    one_shot = OneShotAllReduce.__new__(OneShotAllReduce)
    one_shot.max_bytes, one_shot._buffers = max_bytes, {2: (), 4: ()}
    one_shot._memory = torch.empty(2, 2, 4, 512, dtype=torch.int32)  # four places of 2 KiB
    return one_shot


@pytest.mark.parametrize("reachable", [False, True])
def test_it_is_used_where_all_ranks_reach_each_other(reachable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[torch.device, int]] = []

    def reaches(device: torch.device, peer: int) -> bool:
        asked.append((device, peer))
        return reachable or peer < 3

    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr("nanovllm.distributed.one_shot.reaches", reaches)
    device = torch.device("cuda", 2)
    assert OneShotAllReduce.wanted(1, 4, device) == (default_bytes(4) if reachable else 0, False)
    assert 0 < default_bytes(8) < default_bytes(4) == default_bytes(2)
    assert asked[:3] == [(device, 1), (device, 2), (device, 3)], "rank 1 is on GPU 2, so rank 0 on GPU 1"


def test_a_link_without_atomics_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over PCIe GPUs can read each other's memory, but signals in it would be lost."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, peer: True)
    for known in (False, True):
        monkeypatch.setattr("nanovllm.distributed.one_shot.link_has_atomics", lambda own, peer, known=known: known)
        assert reaches(torch.device("cuda", 0), 1) == known
        assert reaches(torch.device("cuda", 0), 0)
    monkeypatch.setattr("nanovllm.distributed.one_shot.ctypes.CDLL", lambda name: object())
    assert not link_has_atomics(0, 1), "a driver that cannot be asked"


def test_a_gpu_that_is_not_there_cannot_be_reached() -> None:
    assert not reaches(CPU, 0) and not reaches(torch.device("cuda", 0), -1)
    assert not reaches(torch.device("cuda", 0), torch.cuda.device_count())


def test_somebody_can_say_for_what_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    assert OneShotAllReduce.wanted(0, 2, CPU) == (0, True)
    monkeypatch.setenv(SWITCH, "1000")
    assert OneShotAllReduce.wanted(0, 2, CPU) == (1000, True)
    for value in ("-1", "64k", ""):
        monkeypatch.setenv(SWITCH, value)
        with pytest.raises(ValueError, match=f"{SWITCH} must be a number of bytes.*{value!r}"):
            OneShotAllReduce.wanted(0, 2, CPU)


def test_it_takes_what_fits_and_nothing_else() -> None:
    one_shot = with_buffer(6000)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert one_shot.takes((1, 7), dtype) and one_shot.takes((4, 250), dtype)
    assert not one_shot.takes((1, 7), torch.float64), "a number wider than a place's words"
    assert one_shot.takes((1, 512), torch.float32) and not one_shot.takes((1, 513), torch.float32), (
        "longer than a place"
    )
    assert one_shot.takes((2, 1024), torch.bfloat16)
    assert not one_shot.takes((3, 1024), torch.bfloat16), "more bytes than are wanted"
    assert not one_shot.takes((5, 8), torch.bfloat16), "more rows than places"
    assert not one_shot.takes((0, 8), torch.bfloat16) and not one_shot.takes((1, 0), torch.bfloat16)
    assert not one_shot.takes((8,), torch.bfloat16) and not one_shot.takes((1, 1, 8), torch.bfloat16)


def test_no_thread_empties_a_place_that_another_still_waits_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a number of its own a thread would look at another one's, and might not meet it at a barrier."""
    kernel = pytest.importorskip("nanovllm.kernels.fused.sum_over_ranks")
    seen: list[tuple[int, int]] = []

    class Launch:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *tensors, PADDED, num_warps, **rest: seen.append((PADDED, 32 * num_warps))

    monkeypatch.setattr(kernel, "_sum_over_ranks_kernel", Launch())
    for width in (1, 8, 32, 33, 96, 1000, 4096, 8192):
        x = torch.zeros(1, width, dtype=torch.bfloat16)
        kernel.sum_over_ranks(x, (torch.zeros(1, dtype=torch.int16),) * 2, torch.zeros(1), 0, x.dtype)
        numbers, threads = seen[-1]
        assert numbers >= width and numbers % threads == 0


def test_a_group_sums_small_tensors_with_it_and_others_without() -> None:
    class Shift(OneShotAllReduce):
        def sum(self, x: Tensor, dtype: torch.dtype, *then: Any) -> tuple[Tensor, Tensor]:
            return x + 1, x + 1

    class Backend:
        def allreduce(self, xs: list[Tensor]) -> Any:
            xs[0].add_(10)
            return self

        def is_completed(self) -> bool:
            return True

        def wait(self) -> None: ...

    group = Group(0, 2, CPU)
    group._backend = Backend()
    small, large = torch.zeros(1, 8), torch.zeros(4, 512)
    assert group.all_reduce(small.clone()).unique().tolist() == [10]
    group.one_shot = Shift.__new__(Shift)
    vars(group.one_shot).update(vars(with_buffer(1024)))
    assert group.all_reduce(small).unique().tolist() == [1]
    assert group.all_reduce(large).unique().tolist() == [10]
    assert group.all_reduce(torch.zeros(8, 1).t()).unique().tolist() == [1]
    assert group.all_reduce(torch.zeros(8, 2).t()).unique().tolist() == [10], "not contiguous"
    assert group.can_fuse_all_reduce(small.shape, small.dtype) and not group.can_fuse_all_reduce(
        large.shape, large.dtype
    )
    group.leave()
    assert group.one_shot is None


def test_ranks_meet_wherever_their_processes_count() -> None:
    """PyTorch numbers the exchanges of a process: a leader of several engines is further on than its new workers."""
    store = dist.HashStore()
    meetings = [RendezvousStore(store) for _ in range(2)]
    ranks = [dist.PrefixStore("group", meeting) for meeting in meetings]  # as PyTorch wraps them
    for i in range(3):
        keys = [f"kind/{i + counted}/{rank}" for rank, counted in enumerate((7, 0))]
        for rank, key in zip(ranks, keys, strict=True):
            rank.set(key, f"of {key} in exchange {i}")
        ranks[0].wait([f"kind/{i + 7}/1"])
        assert ranks[0].get(f"kind/{i + 7}/1").decode() == f"of kind/{i}/1 in exchange {i}"
        assert ranks[1].get(f"kind/{i}/0").decode() == f"of kind/{i + 7}/0 in exchange {i}"
    ranks[0].set("other", "x")
    assert ranks[1].get("other") == b"x"


@pytest.mark.skipif(not hasattr(dist.Store, "barrier"), reason="before torch 2.13 a store has no barrier")
def test_ranks_meet_in_a_barrier_as_well() -> None:
    store = dist.HashStore()
    meetings: list[Any] = [RendezvousStore(store) for _ in range(2)]
    for meeting, first in zip(meetings, ("kind/9/0", "kind/2/1"), strict=True):
        meeting.set(first, "x")
    keys = "kind/10", "kind/3"
    both = [threading.Thread(target=m.barrier, args=(k, 2, LONG)) for m, k in zip(meetings, keys, strict=True)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(20)
    assert not any(thread.is_alive() for thread in both)
    assert store.get("kind/1/last_member"), "one was in a barrier that the other does not know"


# --- on GPUs ---


def numbers(seed: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Small integers, of which every order of additions makes the same sum."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


def compare_with_nccl(group: Group) -> Callable[[Any], object]:
    """In every rank: sums of many shapes, then of a graph that is replayed on changing numbers."""
    assert group.one_shot is not None
    for seed, shape in enumerate([(1, 8), (1, 4096), (3, 1000), (7, 4096), (9, 4096)]):  # the last is too long
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            expected = sum(numbers(seed, rank, shape, dtype) for rank in range(group.size))
            for _ in range(3):
                x = numbers(seed, group.rank, shape, dtype).to(group.device)
                assert torch.equal(group.all_reduce(x).cpu(), torch.as_tensor(expected))
    x = torch.zeros(4, 4096, dtype=torch.bfloat16, device=group.device)
    weight = torch.ones(4096, dtype=torch.bfloat16, device=group.device)
    graph = torch.cuda.CUDAGraph()

    def step() -> tuple[Tensor, Tensor, Tensor]:
        once = group.all_reduce(x)
        parts = once.float().expand(3, -1, -1).contiguous()  # three times that, on every rank
        return once, *group.all_reduce_add_rms_norm(parts, once, weight, 1e-6)

    step()
    with torch.cuda.graph(graph):
        once, normed, total = step()
    for seed in range(200):
        x.copy_(numbers(seed, group.rank, tuple(x.shape), torch.bfloat16))
        graph.replay()
        expected = torch.as_tensor(
            sum(numbers(seed, rank, tuple(x.shape), torch.float32) for rank in range(group.size))
        )
        assert torch.equal(once.cpu().float(), expected)
        sums = (3 * expected).bfloat16().float() * group.size + expected
        torch.testing.assert_close(total.cpu().float(), sums, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(normed, rms_norm(total, weight, 1e-6), rtol=1e-2, atol=1e-2)
        of_all = group.all_gather(normed)
        assert torch.equal(of_all, normed.expand_as(of_all)), "the same bits on every rank"
    return lambda message: None


@GPUS
def test_sums_are_exact(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, str(MOST))
    team = SpawnedTeam([torch.device("cuda", i) for i in range(size)], compare_with_nccl)
    try:
        team.join()
        with team.in_step(loading=True):
            compare_with_nccl(team.group)
    finally:
        team.close()


@GPUS
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_stories_are_hf_s(size: int, eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, str(MOST))
    prompts = story_prompts(STORY_MODEL)[:8]
    params: Any = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    config: dict[str, Any] = {"device": "cuda", "dtype": "float32", "num_kv_blocks": 64, "enforce_eager": eager}
    with LLM(STORY_MODEL, tensor_parallel_size=size, **config) as llm:
        assert executor_of(llm).runner.group.one_shot is not None
        outputs = generate(llm, prompts, params)
    oracle.check_greedy(STORY_MODEL, prompts, tokens(outputs), params)
