"""Makes a step replayable: a CUDA graph on a GPU, and the step itself where there is no GPU."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from nanovllm.sampling.sampler import Sampled

Step = Callable[[], Sampled]
# Returns what runs the step again. Every replay overwrites the tensors that the first one returned.
Recorder = Callable[[Step], Step]


class CudaGraphRecorder:
    """Records into CUDA graphs that share one memory pool: they never run at the same time. Adds each to `recorded`.

    A step is recorded without being launched. So everything that it launches must have been launched before, on tensors
    of the same shapes: no recording survives a kernel that is loaded, or a library that sets itself up.
    """

    def __init__(self, recorded: list[torch.cuda.CUDAGraph] | None = None) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.recorded = [] if recorded is None else recorded

    def __call__(self, step: Step) -> Step:
        graph = torch.cuda.CUDAGraph()
        with no_garbage_collection(), torch.cuda.graph(graph, pool=self.pool):
            outputs = step()
        self.recorded.append(graph)
        return RecordedStep(graph, step, outputs)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A collection may free the graphs of an engine that nobody has any more, and no recording survives that."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@dataclass(frozen=True)
class RecordedStep:
    """A call replays the step. `step` itself is kept, since a replay reads and writes the memory that `step` holds."""

    graph: torch.cuda.CUDAGraph
    step: Step
    outputs: Sampled

    def __call__(self) -> Sampled:
        self.graph.replay()
        return self.outputs


def record_nothing(step: Step) -> Step:
    """A recorder for tests without a GPU: a replay runs the step anew."""
    return step


def launch_once(step: Step) -> Step:
    """A recorder that launches a step, and records nothing: with it, a start rehearses what it is about to record. It
    waits for the step, whose numbers may still be on their way from host memory that the next step's numbers
    overwrite."""
    step()
    torch.cuda.synchronize()
    return step
