"""What every test runs under: no network, a fixed number of threads, Triton's interpreter where there is no GPU."""

import importlib.util
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# Triton reads this when a kernel is decorated, so it must be set before any test module imports one.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if "OMP_NUM_THREADS" not in os.environ:
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


# --- no network ------------------------------------------------------------------------------------------------------

_attempts: list[str] = []
_REAL = {name: getattr(socket.socket, name) for name in ("connect", "connect_ex")}
_REAL_GETADDRINFO = socket.getaddrinfo


def _is_local(host: Any) -> bool:
    if isinstance(host, bytes):
        host = host.decode("ascii", "replace")
    if host is None or host in ("", "localhost", "::1", "0.0.0.0", "::", socket.gethostname()):
        return True
    return str(host).startswith("127.")


def _refuse(target: Any) -> None:
    _attempts.append(str(target))
    raise OSError(f"tests must not use the network, but something asked for {target}")


def _guarded(name: str) -> Any:
    def method(self: socket.socket, address: Any, /) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_local(address[0]):
            _refuse(address)
        return _REAL[name](self, address)

    return method


def _guarded_getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
    if not _is_local(host):
        _refuse(host)
    return _REAL_GETADDRINFO(host, *args, **kwargs)


@pytest.fixture(scope="session", autouse=True)
def _network_guard() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in _REAL:
            patch.setattr(socket.socket, name, _guarded(name))
        patch.setattr(socket, "getaddrinfo", _guarded_getaddrinfo)
        yield


@pytest.fixture(autouse=True)
def _no_network(_network_guard: None) -> Iterator[None]:
    """Fails the test that tried, even where the code under test swallowed the error and went on."""
    yield
    if _attempts:
        tried = ", ".join(_attempts)
        _attempts.clear()
        pytest.fail(f"this test tried to use the network: {tried}", pytrace=False)
