"""The ways in: `make help` and the targets behind it, the set-up script, and the rules that every test runs under."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tools import setup_env

ROOT = Path(__file__).resolve().parent.parent
MAKEFILE = (ROOT / "Makefile").read_text()
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
SHARED = "-n 3 " if find_spec("xdist") else ""
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make on this machine")


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    # Make hands its own variables down to the tests that it runs.
    dropped = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "ARGS", "IMPL", "JOBS", "PYTHON", "SYSTEM_SITE", "TORCH")
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    arguments = [str(part) for part in command]
    return subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, env=inherited | environment)


# --- the Makefile ----------------------------------------------------------------------------------------------------

QUICK = (
    " -p no:nbval -p no:schemathesis"  # plugins that take seconds to start, and that no test needs in its own process
)


@needs_make
def test_help_lists_every_target_with_a_description() -> None:
    targets = {name.replace("%", "N") for name in re.findall(r"^([a-z][\w%-]*):(?!=)", MAKEFILE, flags=re.MULTILINE)}
    told = run("make", "help").stdout
    assert max(map(len, told.splitlines())) <= 80
    entries = re.findall(r"^  make (\S+) +(.+(?:\n {26}.+)*)$", told, flags=re.MULTILINE)
    listed = {name: " ".join(description.split()) for name, description in entries}
    assert listed.keys() == targets
    described = dict(re.findall(r"^([a-z%-]+):.*## (.+)$", MAKEFILE, flags=re.MULTILINE))
    assert listed == {name.replace("%", "N"): description for name, description in described.items()}
    assert {"setup", "demo", "test", "test-slow", "stage-N-test", "stage-N-notebook", "ladder"} <= targets
    assert all(len(description) > 10 for description in listed.values())


@needs_make
def test_make_alone_is_help() -> None:
    assert run("make").stdout == run("make", "help").stdout


@needs_make
@pytest.mark.parametrize(
    ("target", "command"),
    [
        (["test", "JOBS=3"], f'.venv/bin/python -m pytest {SHARED}-m "not slow and not gpu"{QUICK}'),
        (["test-slow", "JOBS=3"], f'.venv/bin/python -m pytest {SHARED}-m "slow and not gpu"{QUICK}'),
        (["test-slow"], ".venv/bin/python -m tools.make_models"),
        (["test-slow"], ".venv/bin/python -m tools.scheduler_page.pyodide"),
        (["demo"], ".venv/bin/python -m tools.race.demo"),
        (["stage-4-test"], f".venv/bin/python -m pytest tests/stages --stage 4 --impl stages{QUICK}"),
        (
            ["stage-4-test", "IMPL=exercises"],
            f".venv/bin/python -m pytest tests/stages --stage 4 --impl exercises{QUICK}",
        ),
        (
            ["stage-3-bench", "ARGS=--rounds 5"],
            ".venv/bin/python -m benchmarks.stages.stage_bench 3 --impl stages --rounds 5",
        ),
        (["stage-2-notebook"], ".venv/bin/python -m jupyterlab notebooks/2_*.ipynb"),
        (["stage-2-notebook", "ARGS=--allow-root"], ".venv/bin/python -m jupyterlab notebooks/2_*.ipynb --allow-root"),
        (["stage-5-mutants"], ".venv/bin/python -m tools.exercises.mutants 5"),
        (["docs"], ".venv/bin/python tools/setup_env.py --extras docs notebooks"),
        (["slides"], ".venv/bin/python tools/setup_env.py --extras slides"),
    ],
)
def test_a_target_runs_its_command_in_the_projects_own_environment(target: list[str], command: str) -> None:
    """Also from a shell in which some other virtual environment is active."""
    done = run("make", "--dry-run", *target, VIRTUAL_ENV="elsewhere", PATH=os.environ["PATH"])
    assert command in [" ".join(line.split()) for line in done.stdout.splitlines()], done.stdout + done.stderr


@needs_make
@pytest.mark.parametrize("target", ["test", "demo", "models", "stage-1-test", "ladder"])
def test_a_target_does_its_own_setup(tmp_path: Path, target: str) -> None:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "setup_env.py", tmp_path / "tools")
    done = run("make", "--dry-run", target, "PYTHON=python3.12", "SYSTEM_SITE=1", cwd=tmp_path)
    first = done.stdout.splitlines()[0]
    assert first == '"python3.12" tools/setup_env.py --torch "torch==2.13.0" --system-site'


# --- setting up ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project set up beside the packages of this very environment, without a network."""
    root = tmp_path_factory.mktemp("project")
    for name in ("pyproject.toml", "README.md", "LICENSE", "tools", "stages"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, root / name)
    done = run(sys.executable, "tools/setup_env.py", "--system-site", cwd=root, **OFFLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    return root


def test_a_reused_environment_has_the_torch_of_the_other_and_its_own_project(reused: Path, tmp_path: Path) -> None:
    import torch

    python = reused / ".venv" / "bin" / "python"
    where = run(python, "-c", "import torch, stages; print(torch.__file__); print(stages.__file__)", cwd=tmp_path)
    assert where.stdout.splitlines() == [torch.__file__, str(reused / "stages" / "__init__.py")], where.stderr


def test_setting_up_twice_does_nothing(reused: Path) -> None:
    """Also without the options of the first time, as a later `make test` runs it."""
    done = run(sys.executable, "tools/setup_env.py", cwd=reused, **OFFLINE)
    assert (done.returncode, done.stdout) == (0, ".venv is up to date\n")


def test_extras_that_are_there_are_left_alone(reused: Path) -> None:
    done = run(sys.executable, "tools/setup_env.py", "--extras", "slides", cwd=reused, PIP_CONFIG_FILE="no-such-file")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_an_extra_that_cannot_be_installed_is_named(reused: Path) -> None:
    text = (reused / "pyproject.toml").read_text()
    (reused / "pyproject.toml").write_text(text.replace("slides = [", 'slides = ["no-such-package-anywhere", '))
    done = run(sys.executable, "tools/setup_env.py", "--extras", "slides", cwd=reused, **OFFLINE)
    (reused / "pyproject.toml").write_text(text)
    assert done.returncode == 1 and done.stdout == "installing what is missing: no-such-package-anywhere\n"
    assert done.stderr.splitlines()[-1].endswith("could not be (is there a network?): no-such-package-anywhere")


@pytest.mark.slow
def test_a_reused_environment_stays_one_when_the_project_file_changes(reused: Path) -> None:
    text = (reused / "pyproject.toml").read_text()
    (reused / "pyproject.toml").write_text(text.replace('"xxhash",', '"xxhash",\n    "no-such-package-anywhere",'))
    done = run(sys.executable, "tools/setup_env.py", cwd=reused, **OFFLINE)
    (reused / "pyproject.toml").write_text(text)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("could not be installed: no-such-package-anywhere")


@pytest.mark.slow
def test_missing_tools_are_named_and_do_not_stop_a_reused_environment(reused: Path) -> None:
    text = (reused / "pyproject.toml").read_text()
    (reused / "pyproject.toml").write_text(text.replace("dev = [", 'dev = ["no-such-tool-anywhere", '))
    done = run(sys.executable, "tools/setup_env.py", cwd=reused, **OFFLINE)
    (reused / "pyproject.toml").write_text(text)
    assert done.returncode == 0, done.stderr
    assert "going on without" in done.stdout and "no-such-tool-anywhere" in done.stdout
    assert "addsitedir" in json.loads((reused / ".venv" / "setup.json").read_text())["reuse"]


@pytest.mark.parametrize(
    ("found", "installed"),
    [("torch==2.13.0+cpu", ["triton>=3.6", "xxhash"]), ("torch==2.11.0\ntriton==3.5.1", ["xxhash"])],
)
def test_a_reused_torch_gets_a_triton_only_where_there_is_none(
    found: str, installed: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A build of torch for CPUs comes without."""
    answers = iter(["triton>=3.6\nxxhash", found, ""])
    asked_for: list[str] = []
    monkeypatch.setattr(setup_env, "VENV", tmp_path)
    monkeypatch.setattr(setup_env, "ask", lambda *arguments: next(answers))
    monkeypatch.setattr(setup_env, "pip_install", lambda *arguments: asked_for.extend(arguments))
    setup_env.add_missing(["triton>=3.6", "xxhash"])
    assert asked_for[-len(installed) - 1 :] == [tmp_path / "reused.txt", *installed]
    assert (tmp_path / "reused.txt").read_text() == found


def test_reusing_a_python_without_torch_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "setup_env.py", tmp_path / "tools")
    done = run(sys.executable, "-I", "-S", "tools/setup_env.py", "--system-site", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("setup: SYSTEM_SITE=1 reuses the torch of ")
    assert not (tmp_path / ".venv").exists()


def test_an_unsupported_python_is_told_what_to_do() -> None:
    pretend = "import sys; sys.version_info = (3, 14, 0); from tools import setup_env; setup_env.main()"
    done = run(sys.executable, "-c", pretend)
    assert done.returncode == 1
    assert "needs Python 3.11 to 3.13" in done.stderr and "PYTHON=" in done.stderr


# --- what tests run under --------------------------------------------------------------------------------------------

PLANTED = """
import socket
import pytest

def test_swallowed():
    try:
        socket.create_connection(("192.0.2.1", 80), timeout=1)
    except OSError:
        pass

def test_by_name():
    with pytest.raises(OSError):
        socket.getaddrinfo("example.org", 443)

def test_by_udp():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        with pytest.raises(OSError, match="must not use the network"):
            sender.sendto(b"x", ("192.0.2.1", 53))

@pytest.fixture
def fetched():
    test_swallowed()

def test_in_a_fixture(fetched): ...

def test_loopback():
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(("localhost", server.getsockname()[1])).close()

def test_pair():
    left, right = socket.socketpair()
    left.close(), right.close()

@pytest.mark.gpu(99)
def test_many_gpus(): ...
"""


def test_a_test_that_reaches_for_the_network_fails_even_if_it_hides_that(tmp_path: Path) -> None:
    planted = tmp_path / "test_planted.py"
    planted.write_text(PLANTED)
    options = ("-p", "tests.conftest", "-p", "no:cacheprovider", "-c", "pyproject.toml", "--rootdir", ROOT, "-m", "")
    done = run(
        sys.executable, "-m", "pytest", *QUICK.split(), *options, "-rA", "--tb=short", planted, PYTHONPATH=str(ROOT)
    )
    lines = re.findall(r"^(PASSED|FAILED|ERROR) \S*::(\w+)", done.stdout, flags=re.MULTILINE)
    outcomes = {name: outcome for outcome, name in lines}
    assert outcomes == {
        "test_swallowed": "FAILED",
        "test_by_name": "FAILED",
        "test_by_udp": "FAILED",
        "test_in_a_fixture": "ERROR",
        "test_loopback": "PASSED",
        "test_pair": "PASSED",
    }, done.stdout
    assert "this test tried to use the network: 192.0.2.1" in done.stdout
    assert "needs 99 CUDA device(s), this machine has" in done.stdout
