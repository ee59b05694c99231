"""What the tests of stage 7 share: engines on several ranks, ranks that are threads, and a look at what is left."""

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.stages.subject import Subject
from tests.weights import random_llama

PROMPTLY = 5.0  # seconds
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks for what is left in /proc and /dev/shm")

RANKS = [
    pytest.param((2, "cpu"), id="2-gloo"),
    pytest.param((4, "cpu"), id="4-gloo", marks=pytest.mark.slow),
    pytest.param((2, "cuda"), id="2-nccl", marks=pytest.mark.gpu(2)),
    pytest.param((4, "cuda"), id="4-nccl", marks=pytest.mark.gpu(4)),
]
# Little more memory than the longest request needs, and small steps: everybody is cut into chunks and preempted
TINY: dict[str, Any] = {"block_size": 4, "num_blocks": 9, "max_num_seqs": 6, "max_num_batched_tokens": 12}


class Starter:
    """Engines on several ranks, in float32. Those that are shared live until somebody ends them, or the session."""

    def __init__(self, subject: Subject, size: int, device: str) -> None:
        self.subject, self.size, self.device = subject, size, device
        self.kept: dict[Path, Any] = {}

    def __call__(self, path: Path, **options: Any) -> Any:
        options = {"device": self.device, "dtype": torch.float32} | options
        return self.subject.engine(path, tensor_parallel_size=self.size, **options)

    def shared(self, path: Path, **options: Any) -> Any:
        """The engine that an earlier test was given, if it still lives."""
        if path not in self.kept or not self.kept[path].team.close.alive:
            self.kept[path] = self(path, **options)
        self.kept[path].trace.on_event = None
        return self.kept[path]

    def close(self) -> None:
        for engine in self.kept.values():
            engine.close()


@pytest.fixture(scope="session", params=RANKS)
def start_ranks(request: pytest.FixtureRequest, subject: Subject) -> Iterator[Starter]:
    with closing(Starter(subject, *request.param)) as starter:
        yield starter


@pytest.fixture
def story_ranks(start_ranks: Starter, story_model: Path) -> Any:
    """The embedded model: tied embeddings, 4 heads over 2 key/value heads."""
    return start_ranks.shared(story_model)


@pytest.fixture(scope="session")
def awkward_model(checkpoints: Path) -> Path:
    return awkward_checkpoint(checkpoints)


@pytest.fixture
def awkward_ranks(start_ranks: Starter, awkward_model: Path) -> Any:
    return start_ranks.shared(awkward_model, **TINY)


def awkward_checkpoint(directory: Path) -> Path:
    """An odd vocabulary, a bias wherever there can be one, one key/value head, and only negative logits.

    The first number of every hidden state is a large constant: embeddings have it, and no layer adds to it. The head
    takes a multiple of it from every logit.
    """
    shape = {"vocab_size": 511, "num_attention_heads": 4, "num_key_value_heads": 1}
    plain = random_llama(directory, **shape, num_hidden_layers=2, attention_bias=True, mlp_bias=True)
    path = plain.with_name("awkward")
    if not path.exists():
        shutil.copytree(plain, path)
        tensors = load_file(path / "model.safetensors")
        tensors["model.embed_tokens.weight"][:, 0] = 8.0
        tensors["model.norm.weight"][0] = 1.0
        tensors["lm_head.weight"][:, 0] = -40.0
        for name, tensor in tensors.items():
            if "o_proj" in name or "down_proj" in name:
                tensor[0] = 0.0
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


class Threads:
    """The group of one of several ranks that are threads of this process."""

    def __init__(self, rank: int, size: int, desk: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.device = rank, size, torch.device("cpu")
        self.desk, self.barrier = desk, barrier

    def all_gather(self, x: Tensor) -> Tensor:
        self.desk[self.rank] = x
        self.barrier.wait(timeout=20)
        gathered = torch.stack(list(self.desk))
        self.barrier.wait(timeout=20)
        return gathered

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(self.all_gather(x).sum(0))

    def can_fuse_all_reduce(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return False

    @classmethod
    def run(cls, size: int, task: Callable[["Threads"], Any]) -> list[Any]:
        """What `task(group)` returns on every rank."""
        desk, barrier = [None] * size, threading.Barrier(size)
        results: list[Any] = [None] * size

        def work(rank: int) -> None:
            try:
                with torch.inference_mode():
                    results[rank] = task(cls(rank, size, desk, barrier))
            except BaseException as error:
                results[rank] = error
                barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in (
            r for r in results if isinstance(r, BaseException) and not isinstance(r, threading.BrokenBarrierError)
        ):
            raise error
        return results


def in_shared_memory(name: str) -> bool:
    return Path("/dev/shm", name).exists()


def pids_of(engine: Any) -> list[int]:
    return [worker.pid for worker in engine.team.workers.values()]


def stat(pid: int) -> list[str] | None:
    """/proc/PID/stat from the state on, or None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None


def cpu_seconds(pid: int) -> float:
    fields = stat(pid)
    assert fields is not None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def check_gone(pids: list[int], segments: Sequence[str] = ()) -> None:
    """Within seconds: no worker, not even as a zombie of somebody else, and no shared memory."""
    deadline = time.monotonic() + PROMPTLY
    while alive := [pid for pid in pids if (fields := stat(pid)) is not None and fields[0] != "Z"]:
        assert time.monotonic() < deadline, f"still there: {alive}"
        time.sleep(0.02)
    while left := [name for name in segments if in_shared_memory(name)]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.02)
