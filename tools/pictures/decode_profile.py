"""What the CPU and the GPU do during one decode step, recorded on a GPU for notebook 6; and a graph without a GPU.

    python -m tools.pictures.decode_profile [DIRECTORY]

Writes decode_profile.CARD.json.gz, into notebooks/recordings or that directory: stage 5, stage 6 and stage 6 compiled
on the same model and batch. A track is "cpu" (operations of torch), "launch" (calls of the CUDA driver) or "gpu"
(kernels and copies). The profiler makes a step with many operations slower, so the time of a step without the profiler
is recorded too.
"""

from __future__ import annotations

import gzip
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stages.checkpoint import read_config
from stages.core import SamplingParams, make_sequences
from stages.model import Transformer
from stages.stage_5_continuous_batching import ContinuousBatchingEngine
from stages.stage_6_cuda_graphs import CUDAGraphEngine
from tools import ROOT

STEP = "decode step"
SHAPES = ROOT / "benchmarks" / "shapes"
SHAPE = "Qwen3-0.6B"
RECORDINGS = ROOT / "notebooks" / "recordings"
Operation = tuple[str, str, float, float]  # track, name, start and duration in microseconds
aten = torch.ops.aten
ASK_FOR_A_VALUE = (aten.item.default, aten._local_scalar_dense.default, aten.is_nonzero.default, aten.nonzero.default)


@contextmanager
def decoding(engine: ContinuousBatchingEngine, batch: int, prompt_tokens: int, steps: int) -> Iterator[None]:
    """Within the context, `engine.step()` is a decode step of `batch` sequences, up to `steps` times."""
    rng = random.Random(0)
    prompts = [[rng.randrange(engine.config.vocab_size) for _ in range(prompt_tokens)] for _ in range(batch)]
    params = SamplingParams(temperature=0, max_tokens=steps + batch + 1, ignore_eos=True)
    limits = {"vocab_size": engine.config.vocab_size, "max_model_len": engine.config.max_position_embeddings}
    sequences = make_sequences(prompts, params, **limits)
    engine.scheduler.waiting.extend(sequences)
    try:
        with torch.inference_mode():
            while not all(seq.num_output_tokens for seq in sequences):
                engine.step()
            yield
    finally:
        engine.scheduler.waiting.clear()
        engine.scheduler.running.clear()
        for seq in sequences:
            engine.scheduler.release(seq)


def step_ms(engine: ContinuousBatchingEngine, batch: int, prompt_tokens: int = 64, steps: int = 30) -> float:
    """The median time of a decode step in milliseconds."""
    times = []
    with decoding(engine, batch, prompt_tokens, steps):
        for _ in range(steps):
            start = time.perf_counter()
            engine.step()
            if engine.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def trace(engine: ContinuousBatchingEngine, batch: int, prompt_tokens: int = 64) -> list[Operation]:
    """Everything that one decode step does, in order of its start; the step begins at 0. On a CPU: its operations."""
    with decoding(engine, batch, prompt_tokens, steps=8):
        for _ in range(3):
            engine.step()
        return profiled_step(engine) if engine.device.type == "cuda" else timed_step(engine)


def profiled_step(engine: ContinuousBatchingEngine) -> list[Operation]:
    for _ in range(2):  # the first profile sets the profiler up; the second counts
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
            torch.cuda.synchronize()
            with record_function(STEP):
                engine.step()
            torch.cuda.synchronize()
    found = profiler.events()
    whole = next(e for e in found if e.name == STEP and e.device_type == DeviceType.CPU)
    events = []
    for e in found:
        if e.name == STEP or not whole.time_range.start <= e.time_range.start < whole.time_range.end:
            continue
        if e.device_type == DeviceType.CUDA:
            track = "gpu"
        elif e.name.startswith("cu"):
            track = "launch"
        elif e.cpu_parent is whole:
            track = "cpu"
        else:
            continue  # the inner workings of an operation
        began = e.time_range.start - whole.time_range.start
        events.append((track, e.name[:60], round(began, 1), round(e.time_range.elapsed_us(), 1)))
    return sorted(events, key=lambda event: event[2])


class OperationTimer(TorchDispatchMode):
    """Times every operation of torch in `with timer:`."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        self.events.append(("cpu", str(func), 1e6 * start, 1e6 * (time.perf_counter() - start)))
        return out


def timed_step(engine: ContinuousBatchingEngine) -> list[Operation]:
    begin = 1e6 * time.perf_counter()
    with OperationTimer() as timer:
        engine.step()
    return [(track, name, start - begin, us) for track, name, start, us in timer.events]


def record(model: Path, contenders: Mapping[str, Any], device: str) -> dict[str, Any]:
    """The step of each contender (name -> class of its engine) with one sequence: its time, and its trace."""
    stages: dict[str, Any] = {}
    for name, engine_class in contenders.items():
        start = time.perf_counter()
        engine = engine_class(model, device=device, max_num_seqs=1)
        stages[name] = {
            "seconds_to_build": time.perf_counter() - start,
            "events": trace(engine, batch=1),
            "step_ms": step_ms(engine, batch=1),
            "graph_bytes": getattr(engine, "graph_bytes", None),
        }
        print(f"{name}: {stages[name]['step_ms']:.2f} ms a step")
    return {"torch": torch.__version__, "model": model.name, "batch": 1, "stages": stages}


def read(path: Path) -> dict[str, Any]:
    recording: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return recording


def launch_ms(repeats: int = 30) -> float:
    """The least time in milliseconds that a CPU needs to start every operation of a decode step of Qwen3-0.6B.

    Attention is left out. The operations run on matrices so small that computing them takes almost no time.
    """
    config = read_config(SHAPES / SHAPE)
    times = []
    with torch.inference_mode():
        thin = replace(config, hidden_size=16, intermediate_size=16, head_dim=8, vocab_size=32)
        model = Transformer(replace(thin, num_attention_heads=2, num_key_value_heads=1))
        one = torch.zeros(1, dtype=torch.int64)
        for _ in range(repeats):
            start = time.perf_counter()
            model.logits(model(one, one, lambda layer, q, k, v: q))
            times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def busy_us(events: Sequence[Operation], track: str) -> float:
    """How long the track is busy, in microseconds; events that overlap count once."""
    busy = end = 0.0
    for _, _, start, us in sorted((e for e in events if e[0] == track), key=lambda e: e[2]):
        busy += max(0.0, start + us - max(start, end))
        end = max(end, start + us)
    return busy


def load_recording(directory: Path = RECORDINGS) -> dict[str, Any] | None:
    """The recording for the notebook, or None. Prints where it is from, or how to make it."""
    path = next(iter(sorted(directory.glob("decode_profile.*.json.gz"))), None)
    if path is None:
        print("there is no recording of a GPU yet, and the cells that draw from it stay empty;")
        print("on a machine with a GPU, `python -m tools.pictures.decode_profile` makes it")
        return None
    recording = read(path)
    print(f"a recording: {recording['model']} on {recording['card']}, torch {recording['torch']}")
    return recording


class Tape(TorchDispatchMode):
    """A stand-in for a CUDA graph without a GPU: it records the operations within `with tape:`, and runs them again.

    It has the two properties that matter. A Python number keeps the value that it had during the recording: only the
    contents of tensors change from one replay to the next, and every intermediate result keeps its place in memory. And
    asking for the value of a tensor while recording is an error, because a GPU would have to stop and answer. It saves
    no time: Python launches every operation again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ASK_FOR_A_VALUE:
            raise RuntimeError(f"{func} asks for the value of a tensor, and while recording there is none yet")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @torch.inference_mode()
    def play(self) -> None:
        """Run all operations again, and write each result into the memory of the old one."""
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():  # else a view, or done in place
                    old.copy_(new)


class TapeGraph:
    """Takes the place of `CUDAGraph` in stage 6: replay() returns what the function would return now."""

    def __init__(self, function: Callable[[], Tensor]) -> None:
        self.tape = Tape()
        with torch.inference_mode(), self.tape:
            self.output = function()

    def replay(self) -> Tensor:
        self.tape.play()
        return self.output


def main(out: Path) -> None:
    from benchmarks.lib.harness import card_slug
    from benchmarks.lib.workloads import random_checkpoint
    from benchmarks.stages.runners import CompiledEngine

    card = torch.cuda.get_device_name()
    contenders = {"stage 5": ContinuousBatchingEngine, "stage 6": CUDAGraphEngine, "stage 6 compiled": CompiledEngine}
    recording = {"card": card, **record(random_checkpoint(SHAPE), contenders, "cuda"), "model": SHAPE}
    path = out / f"decode_profile.{card_slug(card)}.json.gz"
    path.write_bytes(gzip.compress(json.dumps(recording, separators=(",", ":")).encode(), mtime=0))
    print(f"written to {path} ({path.stat().st_size / 1e3:.0f} kB)")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDINGS)
