"""What every test runs under: no network, a fixed number of threads, Triton's interpreter where there is no GPU."""

import importlib
import importlib.util
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.stage_jobs import StageJobs

if "GPUS" in os.environ and "PYTEST_XDIST_WORKER" in os.environ:
    # The processes that share the tests share the first GPUS of the visible cards, one each. CUDA is not started yet.
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % int(os.environ["GPUS"])
    cards = [card for card in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if card]
    os.environ["CUDA_VISIBLE_DEVICES"] = cards[number] if cards else str(number)

# Triton reads this when a kernel is decorated, so it must be set before any test module imports one.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    importlib.import_module("tests.kernels.interpreter")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it runs in the background deaf to Ctrl-C, and that would be inherited by whatever tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if "OMP_NUM_THREADS" not in os.environ:
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Every core has a process of its own already; more threads than cores are many times slower than one each.
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"  # for what the tests start
    else:
        torch.set_num_threads(min(2, os.cpu_count() or 1))

if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    # The same examples on every run and no timing: a red test is red for everyone.
    settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
    settings.load_profile("fixed")

pytest.register_assert_rewrite("tests.oracle", "tests.stages.conformance")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("stages")
    group.addoption("--stage", action="append", type=int, metavar="N", help="test only stage N (may be repeated)")
    group.addoption("--elective", action="append", metavar="NAME", help="test only this elective (may be repeated)")
    group.addoption(
        "--impl",
        choices=("stages", "exercises"),
        default="stages",
        help="where the stage under test comes from: the solution, or the learner's exercises/",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is None:
            continue
        needed = marker.args[0] if marker.args else marker.kwargs.get("count", 1)
        if found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), this machine has {found}"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Directory of SmolLM2-135M-Instruct, which `make models` writes; a slow test that needs it fails without it."""
    from tools.make_models import model_dir

    directory = model_dir()
    if not (directory / "config.json").exists():
        pytest.fail(f"{directory} is missing: run `make models` once (it needs the network)", pytrace=False)
    return directory


@pytest.fixture(scope="session")
def stage_jobs() -> Iterator[StageJobs]:
    """A process that runs tests of stages (see tests/stage_jobs.py)."""
    jobs = StageJobs()
    yield jobs
    jobs.close()


# --- no network ------------------------------------------------------------------------------------------------------

_attempts: list[str] = []
_patch = pytest.MonkeyPatch()


def _check(host: Any) -> None:
    """Lets only this machine's own names and addresses pass, and remembers the others."""
    name = host.decode(errors="replace") if isinstance(host, bytes) else str(host or "")
    if not (name in ("", "localhost", "::1", "::", "0.0.0.0", socket.gethostname()) or name.startswith("127.")):
        _attempts.append(name)
        raise OSError(f"tests must not use the network, but something asked for {name}")


def _guard_socket(name: str) -> None:
    real = getattr(socket.socket, name)

    def guarded(self: socket.socket, *args: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            _check(args[-1][0])  # the address comes last
        return real(self, *args)

    _patch.setattr(socket.socket, name, guarded)


def pytest_configure() -> None:
    for name in ("connect", "connect_ex", "sendto"):
        _guard_socket(name)
    real = socket.getaddrinfo

    def guarded(host: Any, *args: Any, **kwargs: Any) -> Any:
        _check(host)
        return real(host, *args, **kwargs)

    _patch.setattr(socket, "getaddrinfo", guarded)


def pytest_unconfigure() -> None:
    _patch.undo()


def _fail_what_tried() -> Iterator[None]:
    """Fails a test or a fixture that tried, even where the code under test swallowed the error and went on."""
    try:
        yield
        if _attempts:
            pytest.fail(f"this test tried to use the network: {', '.join(_attempts)}", pytrace=False)
    finally:
        _attempts.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    yield from _fail_what_tried()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    yield from _fail_what_tried()
