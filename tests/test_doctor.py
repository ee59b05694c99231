"""The doctor finds what is wrong, says what to do, and harms nothing."""

import inspect
import io
import os
import socket
import sys
from pathlib import Path

import pytest
from rich.console import Console

from nanovllm.config import EngineConfig
from nanovllm.runner.memory import SHARE, gpu_share
from tools import doctor
from tools.doctor import Finding


def test_what_is_not_well_has_a_remedy() -> None:
    findings = doctor.examine()
    assert {"memory", "port 8000"} <= {f.about for f in findings} or sys.platform != "linux"
    assert [f for f in findings if (f.state == "ok") == bool(f.remedy)] == []
    out = io.StringIO()
    doctor.show(findings, Console(file=out, width=200))
    assert all(f.about in out.getvalue() for f in findings)


def test_the_exit_status_says_whether_something_will_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    for state, status in (("ok", 0), ("note", 0), ("bad", 1)):
        monkeypatch.setattr(doctor, "examine", lambda state=state: [Finding("x", state, "y", "z")])
        assert doctor.main() == status


@pytest.mark.parametrize("value", ["0.3", "1"])
def test_a_share_of_the_gpu(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the doctor advises, the engine keeps to."""
    monkeypatch.setenv(SHARE, value)
    assert gpu_share(EngineConfig(gpu_memory_utilization=0.8)) == min(0.8, float(value))
    monkeypatch.delenv(SHARE)
    assert gpu_share(EngineConfig(gpu_memory_utilization=0.8)) == 0.8
    assert SHARE in inspect.getsource(doctor.gpu)


@pytest.mark.parametrize("value", ["0", "1.5", "much", "nan"])
def test_a_share_that_is_none_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARE, value)
    with pytest.raises(ValueError, match=f"{SHARE}=.*must be"):
        gpu_share(EngineConfig())


def test_a_port_that_is_taken() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert [f.state for f in doctor.ports((port,))] == ["note"]
    assert [f.state for f in doctor.ports((port,))] == ["ok"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc as Linux has it")
def test_leftovers_of_dead_runs(tmp_path: Path) -> None:
    processes, segments = tmp_path / "proc", tmp_path / "shm"
    segments.mkdir()

    def process(pid: str, parent: int, command: str, maps: str = "") -> None:
        (processes / pid).mkdir(parents=True)
        (processes / pid / "cmdline").write_bytes(command.replace(" ", "\0").encode())
        (processes / pid / "stat").write_text(f"{pid} (a (odd) name) S {parent} 0 0")
        (processes / pid / "maps").write_text(maps)

    process("self", 1, "python nanovllm")
    process("900001", 1, "python -m nanovllm.cli serve")
    process("900002", 1, "sshd")
    process("900003", 77, "python -m nanovllm.cli bench", "7f00-7f01 rw-s 00000000 00:1a 5 /dev/shm/psm_open\n")
    process(str(os.getpid()), 1, "python -m nanovllm.doctor")
    for name in ("psm_open", "psm_dead", "something_else"):
        (segments / name).write_bytes(b"x")
    found = list(doctor.leftovers(processes, segments))
    assert [(f.about, f.state) for f in found] == [("process", "note"), ("shared memory", "note")]
    assert "900001" in found[0].found and "kill 900001" in found[0].remedy
    assert "psm_dead" in found[1].found and found[1].remedy == f"rm {segments / 'psm_dead'}"
    assert len(list(segments.iterdir())) == 3
    for path in (processes / "900001" / "cmdline", segments / "psm_dead"):
        path.unlink()
    assert [f.state for f in doctor.leftovers(processes, segments)] == ["ok"]
