"""Check this machine, and say for each problem what to do about it: `make doctor`.

Each line is a check: `ok`, `note` (works, but not as well as it could) or `bad` (something will fail). A note and a bad
line name a remedy. Nothing is changed, no process is ended, and no network is used. The exit status is 1 if a line is
bad.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

GIB = 2**30
PORTS = (8000, 8888)  # nanovllm serve, JupyterLab
PROCESSES, SEGMENTS = Path("/proc"), Path("/dev/shm")
OURS = ("nanovllm", "stages.", "benchmarks.", "tests/")  # every command line of the project has one of these
STYLES = {"ok": "green", "note": "yellow", "bad": "bold red"}


@dataclass(frozen=True)
class Finding:
    about: str
    state: Literal["ok", "note", "bad"]
    found: str
    remedy: str = ""


def gpu() -> Iterator[Finding]:
    """Cards, driver and free memory, as torch sees them."""
    import torch

    driver = Path("/proc/driver/nvidia/version")
    if not torch.cuda.is_available():
        if driver.exists() and torch.version.cuda is None:
            yield Finding("GPU", "bad", "there is a driver, but this torch is made for CPUs", "make setup TORCH=torch")
        elif torch.version.cuda is not None:
            reason = f"torch is made for CUDA {torch.version.cuda}, and finds no usable card"
            yield Finding("GPU", "note", reason, "nvidia-smi says whether there is one, and how old its driver is")
        else:
            yield Finding("GPU", "ok", "none; the CPU does all but `make bench` and what stage 6 measures")
        return
    if driver.exists():
        yield Finding("driver", "ok", driver.read_text().splitlines()[0].split(":", 1)[-1].strip())
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        found = f"{torch.cuda.get_device_name(i)}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        crowded = free < total / 2
        share = "NANOVLLM_GPU_MEMORY=0.3 keeps a person to a share"
        remedy = f"nvidia-smi shows who has the rest; {share}" if crowded else ""
        yield Finding(f"GPU {i}", "note" if crowded else "ok", found, remedy)


def memory() -> Iterator[Finding]:
    info = PROCESSES / "meminfo"
    if info.exists():
        lines = dict(line.split(":", 1) for line in info.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024 / GIB
        little = free < 4
        remedy = "close something; the tests need about 4 GiB, the engine's CPU cache is kv_cache_gib" if little else ""
        yield Finding("memory", "note" if little else "ok", f"{free:.1f} GiB free", remedy)


def ports(numbers: tuple[int, ...] = PORTS) -> Iterator[Finding]:
    for port in numbers:
        with socket.socket() as probe:
            probe.settimeout(0.5)
            taken = probe.connect_ex(("127.0.0.1", port)) == 0
        remedy = "nanovllm serve --port 0 takes any free one; JupyterLab looks for the next by itself" if taken else ""
        yield Finding(f"port {port}", "note" if taken else "ok", "taken" if taken else "free", remedy)


def leftovers(processes: Path = PROCESSES, segments: Path = SEGMENTS) -> Iterator[Finding]:
    """Processes of the project whose parent process is gone, and shared memory that no process has open.

    Only processes and files of this user are looked at.
    """
    if not (processes / "self").exists():
        return
    orphans, mapped = [], set()
    for entry in processes.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if entry.stat().st_uid != os.getuid():
                continue
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            mapped |= {line.split()[-1] for line in (entry / "maps").read_text().splitlines() if "/dev/shm/" in line}
        except OSError:  # it ended meanwhile, or is not ours to read
            continue
        if parent == "1" and "python" in command and any(part in command for part in OURS):
            orphans.append((entry.name, command))
    for pid, command in sorted(orphans):
        remedy = f"kill {pid}, unless you started it to go on by itself"
        yield Finding("process", "note", f"{pid}, whose parent is gone: {command[:60]}", remedy)
    named = sorted([*segments.glob("psm_*"), *segments.glob("nanovllm*")])
    dead = [path for path in named if path.stat().st_uid == os.getuid() and f"/dev/shm/{path.name}" not in mapped]
    for path in dead:
        found = f"{path.name}, {path.stat().st_size / 2**20:.1f} MiB, open in none of your processes"
        yield Finding("shared memory", "note", found, f"rm {path}")
    if not orphans and not dead:
        yield Finding("leftovers", "ok", "no process and no shared memory of dead runs")


def examine() -> list[Finding]:
    checks = (gpu, memory, ports, leftovers)
    return [finding for check in checks for finding in check()]


def show(findings: list[Finding], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("", "about", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        style = STYLES[finding.state]
        table.add_row(f"[{style}]{finding.state}[/]", finding.about, finding.found, finding.remedy)
    console.print(table)


def main() -> int:
    findings = examine()
    show(findings, Console(highlight=False))
    return int(any(finding.state == "bad" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
