"""What happens while kernels are compiled beforehand, on a GPU that is not here: `python -m tests.kernels.precompiled`
with names of functions below. Prints what the functions find."""

import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from time import sleep
from traceback import extract_stack
from typing import Any

import torch
from triton import knobs

from nanovllm.kernels import precompile
from nanovllm.kernels.precompile import Compilers, compiled_together, without_launches
from tests.kernels.absent_gpu import GPU, AbsentGpu, OnMeta, start
from tests.kernels.cards import QWEN3
from tests.kernels.some_kernels import LAUNCHERS, ONLY, doubling, filling, impossible, quadrupling

NUM_ABANDONED = 40  # variants that are asked for by a process that is killed

# So far, in the order of time: what this process compiled, what it asked others for, and which process it asked
compiled: list[str] = []
asked: list[str] = []
started: list[Any] = []


def launch(kernel: Any, size: int, **options: int) -> None:
    kernel[(1,)](torch.empty(size, device=GPU), SIZE=size, **options)


@contextmanager
def seen(gpu: AbsentGpu, answer: dict[str, Any], when: str) -> Iterator[None]:
    """Adds to `answer` what happens within this context."""
    before = len(gpu.launched), len(compiled), len(asked)
    yield
    answer[when] = [len(gpu.launched) - before[0], compiled[before[1] :], asked[before[2] :]]


def processes_left() -> list[str]:
    """The numbers of those that compile, or wait for work, for the latest start."""
    left = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, group = path.read_text().rpartition(") ")[2].split()[:3]
            left += [path.parent.name] if int(group) == started[-1].pid and state != "Z" else []
    return left


def wait_until_gone() -> bool:
    """Whether all of them are gone within seconds. A process that was killed is still seen for a moment."""
    for _ in range(500):
        if not processes_left():
            return True
        sleep(0.01)
    return False


# Each has sizes of its own, so that nothing is in Triton's cache.


def usual(gpu: AbsentGpu, answer: dict[str, Any]) -> None:
    """The first size is launched twice beforehand, and the last one not at all."""
    with compiled_together(2), seen(gpu, answer, "beforehand"):
        for size in (16, 16, 32):
            launch(doubling, size)
    with seen(gpu, answer, "afterwards"):
        for size in (16, 32, 64):
            launch(doubling, size)


def launching(gpu: AbsentGpu, answer: dict[str, Any]) -> None:
    """Of three launches the second needs what is not there; then one needs what is there."""
    launch(doubling, 524288)
    with compiled_together(2, launching=True) as missing, seen(gpu, answer, "some are missing"):
        for size in (524288, 1048576, 524288):
            launch(doubling, size)
    answer["missing"] = len(missing)
    with compiled_together(2, launching=True) as missing, seen(gpu, answer, "none is missing"):
        launch(doubling, 1048576)
        launch(doubling, 524288)
    answer["still missing"] = len(missing)


def shared(gpu: AbsentGpu, answer: dict[str, Any]) -> None:
    """A kernel that shares a function with another, which only this process has used."""
    launch(doubling, 16)
    with compiled_together(2):
        launch(quadrupling, 16)
    with seen(gpu, answer, "afterwards"):
        launch(quadrupling, 16)


def nothing(gpu: AbsentGpu, answer: dict[str, Any]) -> None:
    with without_launches(), seen(gpu, answer, "beforehand"):
        launch(doubling, 128)
    with seen(gpu, answer, "afterwards"):
        launch(doubling, 128)


def thread(gpu: AbsentGpu, answer: dict[str, Any]) -> None:
    """Another thread launches."""

    def launch_there() -> None:
        with OnMeta():
            launch(doubling, 256)

    with compiled_together(2), seen(gpu, answer, "beforehand"):
        other = Thread(target=launch_there)
        other.start()
        other.join()


def waits(thread: Thread) -> bool:
    """Whether this thread waits for its turn to change launches."""
    return extract_stack(sys._current_frames()[thread.ident or 0])[-1].name == "launches_changed"


def two_starts(gpu: AbsentGpu, answer: dict[str, Any]) -> None:
    """Another thread waits for its turn, and compiles while this one launches again."""
    turn, over = Event(), Event()

    def start_there() -> None:
        with compiled_together(2):
            turn.set()
            over.wait()

    other = Thread(target=start_there)
    with without_launches():
        other.start()
        while not waits(other):
            sleep(0.01)
    turn.wait()
    with seen(gpu, answer, "meanwhile"):
        launch(doubling, 16384)
    over.set()
    other.join()


def wrong(gpu: AbsentGpu, answer: dict[str, Any]) -> None:
    """A kernel that cannot be compiled."""
    with compiled_together(2):
        launch(impossible, 512)
        launch(doubling, 512)
    with seen(gpu, answer, "afterwards"):
        launch(doubling, 512)
    try:
        launch(impossible, 512)
    except Exception as error:
        answer["error"] = str(error)


def killed(gpu: AbsentGpu, answer: dict[str, Any]) -> None:
    """The process that compiles is killed."""
    os.environ[ONLY] = str(os.getpid())
    with compiled_together(2):
        launch(doubling, 1024)
    del os.environ[ONLY]
    with seen(gpu, answer, "afterwards"):
        launch(doubling, 1024)


def beheaded(gpu: AbsentGpu, answer: dict[str, Any]) -> None:
    """The process that forks the others is killed, and leaves them alone."""
    with compiled_together(2):
        launch(doubling, 32768)
        while len(processes_left()) < 3:
            sleep(0.01)
        os.kill(started[-1].pid, signal.SIGKILL)
    answer["gone"] = wait_until_gone()
    with seen(gpu, answer, "afterwards"):
        launch(doubling, 32768)


def elsewhere(gpu: AbsentGpu, answer: dict[str, Any]) -> None:
    """The start is made in a directory with a file that has the name of a module, and that this process cannot see."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="with spaces ") as directory:
        Path(directory, "triton.py").write_text("raise SystemExit(1)")
        os.chdir(directory)
        with compiled_together(2):
            launch(doubling, 65536)
        os.chdir(before)
    with seen(gpu, answer, "afterwards"):
        launch(doubling, 65536)


def abandoned(gpu: AbsentGpu, answer: dict[str, Any]) -> None:
    """This process is killed as soon as something is compiled for it. Much more was asked for."""
    with compiled_together(2):
        for stages in range(NUM_ABANDONED):
            launch(doubling, 16, num_stages=stages)
        while not list(Path(os.environ["TRITON_CACHE_DIR"]).glob("*/doubling.json")):
            sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def launchers(gpu: AbsentGpu, answer: dict[str, Any]) -> None:
    """Two sizes have the same types of arguments, and another kernel has others."""
    with tempfile.TemporaryDirectory() as directory:
        os.environ[LAUNCHERS] = directory
        with compiled_together(2):
            launch(doubling, 131072)
            launch(doubling, 262144)
            filling[(1,)](torch.empty(16, device=GPU), 2.0, SIZE=16)
        del os.environ[LAUNCHERS]
        answer["made"] = sorted(path.name for path in Path(directory).iterdir())


def no_process(gpu: AbsentGpu, answer: dict[str, Any]) -> None:
    """The process that should compile ends at once."""
    sys.executable, python = "/bin/false", sys.executable
    with compiled_together(2):
        launch(doubling, 2048)
        started[-1].wait()
        launch(doubling, 4096)  # asks a process that is gone
    sys.executable = python
    with seen(gpu, answer, "afterwards"):
        launch(doubling, 2048)
        launch(doubling, 4096)


def given_up(gpu: AbsentGpu, answer: dict[str, Any]) -> None:
    """The start fails while others compile for it. Says whether theirs are gone."""
    with suppress(ZeroDivisionError), compiled_together(2):
        launch(doubling, 8192)
        raise ZeroDivisionError
    answer["gone"] = wait_until_gone()
    with seen(gpu, answer, "afterwards"):
        launch(doubling, 8192)


def engine(gpu: AbsentGpu, answer: dict[str, Any]) -> None:
    """A small engine starts."""
    with seen(gpu, answer, "start"):
        start(QWEN3, max_num_seqs=3, max_num_batched_tokens=40, max_model_len=100)
    answer["variants"] = len(gpu.noted)


def watch() -> None:
    """From now on note what is compiled here, what is asked for, and which processes are started."""

    def note(src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append(src.name)

    knobs.compilation.listener = note
    ask, begin = Compilers.ask, Compilers._start

    def note_question(self: Compilers, source: Any, target: Any, options: Any) -> None:
        asked.append(source.name)
        ask(self, source, target, options)

    def note_process(self: Compilers) -> Any:
        started.append(begin(self))
        return started[-1]

    Compilers.ask, Compilers._start = note_question, note_process  # type: ignore[method-assign]


if __name__ == "__main__":
    logging.getLogger(precompile.__name__).setLevel(logging.DEBUG)
    watch()
    absent = AbsentGpu(90, compiles=True)
    found: dict[str, dict[str, Any]] = {name: {} for name in sys.argv[1:]}
    with OnMeta():
        for name, answer in found.items():
            globals()[name](absent, answer)
    print(json.dumps(found))
