"""What the CPU and the GPU do during one decode step: `python -m tools.decode_profile --out DIRECTORY`, on a GPU.

Writes decode_profile.CARD.json for notebook 6: stage 5, stage 6 and stage 6 compiled on the same model and batch. A
track is "cpu" (operations of torch), "launch" (calls of the CUDA driver) or "gpu" (kernels and copies). Times under the
profiler are too long where there is much to write down, so the time of a step without it stands beside them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from stages.core import SamplingParams, make_sequences
from stages.stage_5_continuous_batching import ContinuousBatchingEngine
from stages.stage_6_cuda_graphs import CUDAGraphEngine

STEP = "decode step"
SHAPE = "Qwen3-0.6B"
Event = tuple[str, str, float, float]  # track, name, start and duration in microseconds


@contextmanager
def decoding(engine: ContinuousBatchingEngine, batch: int, prompt_tokens: int, steps: int) -> Iterator[None]:
    """Inside, `engine.step()` is a decode step of `batch` sequences, up to `steps` times."""
    rng = random.Random(0)
    prompts = [[rng.randrange(engine.vocab_size) for _ in range(prompt_tokens)] for _ in range(batch)]
    params = SamplingParams(temperature=0, max_tokens=steps + batch + 1, ignore_eos=True)
    limits = {"vocab_size": engine.vocab_size, "max_model_len": engine.config.max_position_embeddings}
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


def synchronize(engine: ContinuousBatchingEngine) -> None:
    if engine.device.type == "cuda":
        torch.cuda.synchronize()


def step_ms(engine: ContinuousBatchingEngine, batch: int, prompt_tokens: int = 64, steps: int = 30) -> float:
    """The median time of a decode step in milliseconds."""
    times = []
    with decoding(engine, batch, prompt_tokens, steps):
        for _ in range(steps):
            start = time.perf_counter()
            engine.step()
            synchronize(engine)
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def trace(engine: ContinuousBatchingEngine, batch: int, prompt_tokens: int = 64) -> list[Event]:
    """Everything that one decode step does, in order of its start; the step begins at 0."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (engine.device.type == "cuda")
    with decoding(engine, batch, prompt_tokens, steps=8):
        for _ in range(3):
            engine.step()
        for _ in range(2):  # the first profile sets the profiler up; the second counts
            with profile(activities=activities, acc_events=True) as profiler:
                synchronize(engine)
                with record_function(STEP):
                    engine.step()
                synchronize(engine)
    found = profiler.events()
    whole = next(e for e in found if e.name == STEP and e.device_type == torch.autograd.DeviceType.CPU)
    events = []
    for e in found:
        if e.name == STEP or not whole.time_range.start <= e.time_range.start < whole.time_range.end:
            continue
        if e.device_type == torch.autograd.DeviceType.CUDA:
            track = "gpu"
        elif e.name.startswith("cu"):
            track = "launch"
        elif e.cpu_parent is whole:
            track = "cpu"
        else:
            continue  # the inner workings of an operation
        events.append((track, e.name[:60], e.time_range.start - whole.time_range.start, e.time_range.elapsed_us()))
    return sorted(events, key=lambda event: event[2])


def record(engine: ContinuousBatchingEngine, batch: int) -> dict[str, Any]:
    """Step time, and the trace with each name written down once."""
    events = trace(engine, batch)
    names = sorted({name for _, name, _, _ in events})
    number = {name: i for i, name in enumerate(names)}
    return {
        "step_ms": step_ms(engine, batch),
        "graph_bytes": getattr(engine, "graph_bytes", None),
        "names": names,
        "events": [[track, number[name], round(start, 1), round(length, 1)] for track, name, start, length in events],
    }


def read(path: Path) -> dict[str, Any]:
    """A recording, with the names of its events put back."""
    recording: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for stage in recording["stages"].values():
        stage["events"] = [(track, stage["names"][name], start, us) for track, name, start, us in stage["events"]]
    return recording


def main() -> None:
    from benchmarks.harness import card_slug
    from benchmarks.random_checkpoint import random_checkpoint

    parser = argparse.ArgumentParser(description="Record one decode step of stage 5 and of stage 6.")
    parser.add_argument("--model", type=Path, help=f"checkpoint directory (default: {SHAPE} with random weights)")
    parser.add_argument("--device", default="cuda", help="cpu only tries the code out")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("notebooks/recordings"), help="directory for the JSON")
    options = parser.parse_args()
    model = options.model or random_checkpoint(SHAPE)
    contenders: dict[str, Any] = {"stage 5": (ContinuousBatchingEngine, {}), "stage 6": (CUDAGraphEngine, {})}
    if options.device != "cpu":
        contenders["stage 6 compiled"] = (CUDAGraphEngine, {"compile": True})
    stages = {}
    for name, (engine_class, more) in contenders.items():
        start = time.perf_counter()
        engine = engine_class(model, device=options.device, max_num_seqs=options.batch, **more)
        ready = time.perf_counter() - start
        stages[name] = {"seconds_to_build": ready, **record(engine, options.batch)}
        print(f"{name}: built in {ready:.1f} s, {stages[name]['step_ms']:.2f} ms a step")
        del engine
    card = torch.cuda.get_device_name() if options.device != "cpu" else "cpu"
    recording = {
        "card": card,
        "torch": torch.__version__,
        "model": SHAPE if options.model is None else model.name,
        "batch": options.batch,
        "stages": stages,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"decode_profile.{'cpu' if card == 'cpu' else card_slug(card)}.json"
    path.write_text(json.dumps(recording, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"written to {path} ({path.stat().st_size / 1e3:.0f} kB)")


if __name__ == "__main__":
    main()
