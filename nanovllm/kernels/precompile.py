"""Has the kernels of a start compiled by many processes at once, before the start launches them.

Triton compiles a variant of a kernel when it is first launched: one after the other, on one core. A model needs some
fifty. So a start is gone through twice. The first time, within `compiled_together`, no kernel is launched. Triton finds
out which variant a launch needs, and the variants that its cache on disk lacks are compiled by other processes. The
second time, everything is found in the cache. (On one GPU the first time launches as long as the cache lacks nothing.
If it lacks nothing to the end, there is no second time.) A variant that could not be compiled beforehand, for whatever
reason, is compiled when it is launched.

Threads would gain nothing: most of Triton's compiler holds Python's lock. Nor can this process be forked, since it has
threads and uses a GPU. So a new process imports Triton, and forks the processes that compile, as PyTorch's Inductor
does. None of them touches the GPU.
"""

import hashlib
import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import get_context
from threading import Lock, get_ident
from types import SimpleNamespace
from typing import Any, NamedTuple

import triton
from tqdm import tqdm
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager, triton_key
from triton.runtime.jit import JITFunction

logger = logging.getLogger(__name__)

MAX_PROCESSES = 16  # the longest variant takes a sixth of the time of all, so that more would gain nothing
COMMAND = """
from nanovllm.startup import large_imports
with large_imports():
    from nanovllm.kernels.precompile import serve
serve({})
"""  # of the process that forks those that compile
_changing, _hashing = Lock(), Lock()


def num_processes(num_ranks: int) -> int:
    """How many processes may compile for one of `num_ranks` ranks on this host."""
    return min(MAX_PROCESSES, len(os.sched_getaffinity(0)) // num_ranks)


class Variant(NamedTuple):
    """What Triton compiles. Plain data, which can be sent to another process."""

    kind: type[ASTSource]
    module: str
    kernel: str
    kernel_hash: str
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    target: GPUTarget
    options: dict[str, Any]

    def compile(self, with_launcher: bool) -> None:
        """Compile down to machine code, which goes into Triton's cache.

        with_launcher: compile the launcher as well, a C program for all kernels with arguments of these types. Triton
            3.6 has such launchers; compiling one takes a third of a second.
        """
        target = self.target
        # All that a compilation asks of a driver. Triton's own driver would occupy memory of the GPU.
        triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target))
        kernel = getattr(import_module(self.module), self.kernel)
        # Triton's hash of a kernel depends on which kernels the process has used before, if they share a function that
        # reads a constant of its module. With another hash nobody would find what is compiled here.
        kernel.hash = self.kernel_hash
        source = self.kind(kernel, self.signature, self.constants, self.attributes)
        program = triton.compile(source, target=target, options=self.options)
        if with_launcher and hasattr(driver, "make_launcher"):
            driver.CudaLauncher(source, program.metadata)


def hash_triton() -> None:
    """Have Triton hash itself, half a gigabyte, once: the names in its cache depend on it. Another thread that has
    begun is waited for."""
    with _hashing:
        triton_key()


def is_cached(source: ASTSource, target: GPUTarget, options: Any) -> bool:
    """Whether `triton.compile` will find this in Triton's cache on disk."""
    key = get_cache_key(source, make_backend(target), options, env_vars=get_cache_invalidating_env_vars())
    cache, file = get_cache_manager(hashlib.sha256(key.encode()).hexdigest()), f"{source.name[:150]}.json"
    return file in (cache.get_group(file) or {})


class Compilers:
    """A process that forks others, which compile what they are asked for. The first question starts it."""

    def __init__(self, num_processes: int) -> None:
        self.num_processes, self.num_asked = num_processes, 0
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, source: ASTSource, target: GPUTarget, options: Any) -> None:
        """Have this compiled. Returns at once."""
        kernel: Any = source.fn
        described = source.signature, source.constants, source.attrs, target, options.__dict__
        try:
            names = kernel.__module__, kernel.__name__, kernel.cache_key
            question = pickle.dumps(Variant(type(source), *names, *described))
            stdin = (self.process or self._start()).stdin
            assert stdin is not None
            stdin.write(question)
            self.num_asked += 1
        except (pickle.PicklingError, AttributeError, TypeError, OSError) as error:
            logger.debug("%s will be compiled when it is launched: %r", kernel.__name__, error)

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-c", COMMAND.format(self.num_processes)]
        # A thread that is no use, or is not there after a fork, is not even started
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if logger.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
            env=os.environ | threads | {"PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,  # so that `stop` ends the forked processes as well
        )
        return self.process

    def wait(self) -> None:
        """Until all is compiled that was asked for, or cannot be."""
        if self.process is None:
            return
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        told = f"compiling kernels with {self.num_processes} processes"
        for line in tqdm(self.process.stdout, desc=told, total=self.num_asked, leave=False):
            if line.strip():
                logger.debug("compiled when it is launched: %s", line.decode().strip())
        if self.process.wait():
            logger.debug("the process that compiles kernels ended with code %d", self.process.returncode)

    def stop(self) -> None:
        """End all processes, whatever they are doing."""
        if self.process is None:
            return
        with self.process:  # which closes the pipes, and waits
            if self.process.poll() != 0:
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)


@contextmanager
def without_launches() -> Iterator[None]:
    """Within this context this thread launches no kernel of ours, so that nothing is compiled either. What the kernels
    would have written is undefined."""
    with launches_changed(lambda run, *args, **kwargs: None):
        yield


@contextmanager
def compiled_together(num_processes: int, launching: bool = False) -> Iterator[set[Any]]:
    """Within this context this thread launches no kernel of ours. With `launching` it does, until Triton's cache lacks
    one. When the context ends, `num_processes` processes have compiled the variants that the launches needed and the
    cache lacked. Gives a set, which stays empty if the cache has all of them.

    Nothing that goes wrong in those processes is an error: what they have not compiled is compiled when it is launched.
    """
    hash_triton()
    thread = get_ident()
    compilers, asked = Compilers(num_processes), set[Any]()

    def compile_or_ask(
        self: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, attributes: Any, warmup: bool
    ) -> Any:
        if get_ident() == thread:
            if (self, key) in asked:
                return None
            source = self.ASTSource(self, signature, constants, attributes)
            target = triton.runtime.driver.active.get_current_target()
            if not is_cached(source, target, options):
                asked.add((self, key))
                compilers.ask(source, target, options)
                return None
        return compile_now(self, key, signature, device, constants, options, attributes, warmup)

    def find_variant(run: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(*args, warmup=warmup or not launching or bool(asked), **kwargs)

    try:
        with launches_changed(find_variant):
            compile_now = JITFunction._do_compile
            with replaced("_do_compile", compile_or_ask):
                yield asked
        compilers.wait()
    finally:
        compilers.stop()


@contextmanager
def launches_changed(launch: Any) -> Iterator[None]:
    """Within this context this thread's launches go to `launch`, as does Triton's own way to launch. Other threads, in
    which another engine may be running, go on as ever, and none of them can enter such a context meanwhile."""
    thread = get_ident()

    def run_of_thread(*args: Any, **kwargs: Any) -> Any:
        return launch(run, *args, **kwargs) if get_ident() == thread else run(*args, **kwargs)

    with _changing:
        run = JITFunction.run  # Triton's, since no other thread is within such a context
        with replaced("run", run_of_thread):
            yield


@contextmanager
def replaced(method: str, by: Any) -> Iterator[None]:
    """Within this context Triton's JITFunction has another method."""
    before = getattr(JITFunction, method)
    setattr(JITFunction, method, by)
    try:
        yield
    finally:
        setattr(JITFunction, method, before)


def answer(done: "Future[None]") -> None:
    """Write a line for a variant: empty, or why the variant could not be compiled."""
    error = done.exception()
    try:
        print("" if error is None else repr(error).replace("\n", " "), flush=True)
    except BrokenPipeError:  # whoever asked was killed, so nobody waits for the rest
        os.killpg(0, signal.SIGKILL)


def leave_stdout() -> None:
    """Leave stdout to the process that answers: when that process ends, nobody waits for another line. What a compiler
    prints is no answer either."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def serve(num_processes: int) -> None:
    """Compile what is asked for on stdin, until nothing more can come."""
    hash_triton()  # or each of the processes would
    seen = set()
    with ProcessPoolExecutor(num_processes, get_context("fork"), leave_stdout) as pool:
        while True:
            try:
                variant = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            types = str(list(variant.signature.values()))
            pool.submit(variant.compile, with_launcher=types not in seen).add_done_callback(answer)
            seen.add(types)
