"""What serving costs, without a model: fake tokens through the real engine loop, real messages and real HTTP.

    python -m benchmarks.serving.mock [--api-servers 1] [--streams 256] [--rate 50000] [--seconds 10]

An executor that computes nothing gives every sequence a random token of the story model's vocabulary at each step, and
takes as long for it as a GPU would that makes `--rate` tokens a second. Everything else is what `nanovllm serve` runs.
The clients read streams, one after the other each. So a machine without a GPU shows

- the CPU time that a token costs each process (the engine's own share is measured apart, without any server),
- how many tokens a chunk has: more than one where an API process could not take all in time and deltas were merged,
- fairness: how many tokens the worst and the best of all streams got in the same time.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.serving.started import ROOT, check_status, started  # that of the harness would import torch
from nanovllm.config import EngineConfig
from nanovllm.engine.engine import LLMEngine
from nanovllm.engine.plan import StepMasks, StepPlan, StepResult
from nanovllm.sampling_params import SamplingParams

EMBEDDED_MODEL = ROOT / "assets" / "story_model"
VOCAB_SIZE = 4096
LIKE_A_GPU = {"rate": 5e5, "step": 0.00055, "prompt": 0.00095}  # about an H200 with Qwen3-0.6B, see `FakeExecutor`
SERVER = [sys.executable, "-m", "benchmarks.serving.mock", "--server"]
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json"
CONFIG = EngineConfig(
    num_kv_blocks=8192,
    kvcache_block_size=256,
    max_model_len=4096,
    max_num_seqs=512,
    async_scheduling=True,
    enable_prefix_caching=False,
)


# --- a model that is none ---------------------------------------------------------------------------------------------


@dataclass
class FakeStep:
    result_of_step: StepResult
    due: float  # seconds of time.perf_counter()
    executor: "FakeExecutor"

    def guesses(self) -> dict[int, list[int]]:
        return {}

    def draw(self, masks: StepMasks) -> None: ...

    def result(self) -> StepResult:
        time.sleep(max(0.0, self.due - time.perf_counter()))
        self.executor.last_end = time.perf_counter()
        return self.result_of_step


class FakeExecutor:
    """Steps take their time one after the other, as on a GPU: 1 / rate for each token that is drawn, and so many
    seconds for the step itself and for each prompt."""

    def __init__(self, rate: float, step: float = 0.0, prompt: float = 0.0) -> None:
        self.rate, self.step, self.prompt = rate, step, prompt
        self.last_end = 0.0  # when the step loop had the result that it waited for last
        self._free = 0.0
        draw = random.Random(0)
        self._tokens = [draw.randrange(300, VOCAB_SIZE) for _ in range(4096)]
        self._next = 0

    def add(self, key: int, token_ids: Sequence[int], params: SamplingParams) -> None: ...
    def remove(self, key: int) -> None: ...
    def close(self) -> None: ...

    def submit(self, plan: StepPlan) -> FakeStep:
        keys = [item.key for item in plan.scheduled if item.sample]
        self._next += len(keys)
        tokens = {key: ([self._tokens[(self._next + i) % 4096]], None) for i, key in enumerate(keys)}
        now = time.perf_counter()
        prompts = sum(item.num_tokens > 1 for item in plan.scheduled)
        self._free = max(self._free, now) + self.step + len(keys) / self.rate + self.prompt * prompts
        return FakeStep(StepResult(tokens), self._free, self)  # type: ignore[arg-type]


@dataclass
class FakeLLM:
    """As much of `LLM` as the engine's process uses."""

    rate: float
    step: float = 0.0
    prompt: float = 0.0
    path: Path = EMBEDDED_MODEL
    config: EngineConfig = CONFIG
    sampling_defaults: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine = LLMEngine(FakeExecutor(self.rate, self.step, self.prompt), self.config, vocab_size=VOCAB_SIZE)

    def close(self) -> None:
        self.engine.close()


def engine_alone(num_streams: int, num_steps: int = 400) -> float:
    """CPU seconds of a step in the engine itself, with a token for each stream: scheduling and committing."""
    engine = FakeLLM(1e12).engine
    for i in range(num_streams):
        engine.add_request(str(i), [1] * 16, SamplingParams(max_tokens=4000, ignore_eos=True))
    for _ in range(10):
        engine.advance()
    start = time.process_time()
    for _ in range(num_steps):
        engine.advance()
    return (time.process_time() - start) / num_steps


def run_server(options: argparse.Namespace) -> None:
    """What `nanovllm serve` does, with the fake in place of a model."""
    from nanovllm.cli import parser
    from nanovllm.server.serve import Family, bind
    from nanovllm.server.wires import wires

    args = parser().parse_args(["serve", "--no-access-log", "--drain-timeout", "1", "--max-queue", "10000"])
    args.settle(args)
    with bind("127.0.0.1", 0, options.api_servers) as sockets, wires() as used:
        Family(used, sockets, args).run(FakeLLM, (options.rate, options.step, options.prompt))


def run_ray(options: argparse.Namespace) -> None:
    """What `examples/ray_serve.py` does, with one replica and the fake in place of a model."""
    from examples.ray_serve import Replica, main

    class FakeReplica(Replica):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.llm.llm.engine.executor = FakeExecutor(options.rate)

    main([str(EMBEDDED_MODEL), "--replicas", "1", "--port", str(options.ray)], FakeReplica)


# --- clients ----------------------------------------------------------------------------------------------------------


class Reader(asyncio.Protocol):
    """One stream after the other, over one connection each; looks at as little as possible of what it reads."""

    def __init__(self, max_tokens: int) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        body["stream_options"] = {"include_usage": True}
        content = json.dumps(body).encode()
        head = f"{HEAD}\r\nContent-Length: {len(content)}\r\n\r\n"
        self.request = head.encode() + content
        self.num_chunks = 0
        self.tail = b""
        self.ended = 0
        self.gaps: list[float] = []
        self._last = 0.0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._last:
            self.gaps.append(now - self._last)
        self._last = now
        self.num_chunks += data.count(b'"text":')
        if b"[DONE]" in data:
            self.ended += 1
            self._last = 0.0
            self.transport.write(self.request)


def children(pid: int) -> list[int]:
    """The engine's process first, then the API processes."""
    tasks = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(p) for p in tasks if b"resource_tracker" not in Path(f"/proc/{p}/cmdline").read_bytes()]


def ray_processes(session: int) -> list[int]:
    """The replica first, then the proxy. Both are in the session in which Ray was started, and have titles."""
    command = ["pgrep", "--session", str(session), "--full"]
    return [int(subprocess.check_output([*command, f"^ray::{name}"])) for name in ("ServeReplica", "ProxyActor")]


def cpu_seconds(pid: int) -> tuple[float, float]:
    """In Python and libraries, and in the kernel: the second is mostly sending and waking, which virtual machines make
    dear."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / tick, int(fields[12]) / tick


def memory_mib(pid: int) -> float:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return int(fields["Pss"].split()[0]) / 1024


def generated(port: int) -> float:
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    [line] = [line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total")]
    return float(line.rpartition(" ")[2])


async def measure(port: int, pids: list[int], options: argparse.Namespace) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    readers = [Reader(options.max_tokens) for _ in range(options.streams)]
    for reader in readers:
        await loop.create_connection(lambda reader=reader: reader, "127.0.0.1", port)  # type: ignore[misc]
    await asyncio.sleep(1)
    for reader in readers:
        reader.gaps.clear()
    tokens, chunks = await asyncio.to_thread(generated, port), [reader.num_chunks for reader in readers]
    cpu, own, start = [cpu_seconds(pid) for pid in pids], time.process_time(), time.perf_counter()
    await asyncio.sleep(options.seconds)
    after, own, seconds = [cpu_seconds(pid) for pid in pids], time.process_time() - own, time.perf_counter() - start
    counts = [reader.num_chunks - before for reader, before in zip(readers, chunks, strict=True)]
    tokens = await asyncio.to_thread(generated, port) - tokens
    gaps = sorted(gap for reader in readers for gap in reader.gaps)
    for reader in readers:
        reader.transport.abort()
    used = [(now[0] - before[0], now[1] - before[1]) for now, before in zip(after, cpu, strict=True)]
    user, kernel = sum(u for u, _ in used[1:]), sum(k for _, k in used[1:])
    return {
        "tokens_per_second": tokens / seconds,
        "tokens_per_chunk": tokens / sum(counts),
        "engine_us_per_token": (1e6 * used[0][0] / tokens, 1e6 * used[0][1] / tokens),
        "api_us_per_token": (1e6 * user / tokens, 1e6 * kernel / tokens),
        "api_us_per_chunk": (1e6 * user / sum(counts), 1e6 * kernel / sum(counts)),
        "busy": [sum(u) / seconds for u in used],
        "client_busy": own / seconds,
        "fairness": (min(counts), max(counts)),
        "gap_ms": [1e3 * gaps[int(len(gaps) * q)] for q in (0.5, 0.99)],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.serving.mock", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--api-servers", type=int, default=1)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=50_000, help="tokens a second of the fake GPU")
    parser.add_argument("--step", type=float, default=0.0, help="seconds that each of its steps takes beside that")
    parser.add_argument("--prompt", type=float, default=0.0, help="seconds that each prompt takes beside that")
    parser.add_argument("--max-tokens", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--server", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ray", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.server:
        run_server(options) if options.ray is None else run_ray(options)
        return 0
    print(f"engine alone: {1e6 * engine_alone(options.streams) / options.streams:.2f} us a token")
    with serving(options.rate, options.step, options.prompt, options.api_servers) as (popen, port):
        pids = children(popen.pid)
        idle = [cpu_seconds(pid) for pid in [popen.pid, *pids]]
        time.sleep(5)
        print(
            "idle:",
            [f"{100 * (sum(cpu_seconds(p)) - sum(b)) / 5:.2f}%" for p, b in zip([popen.pid, *pids], idle, strict=True)],
        )
        print("MiB:", [round(memory_mib(pid)) for pid in [popen.pid, *pids]])
        for name, value in asyncio.run(measure(port, pids, options)).items():
            print(f"{name}: {value}")
    return 0


@contextmanager
def serving(
    rate: float, step: float = 0.0, prompt: float = 0.0, api_servers: int = 1
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The server with the fake model, as its process and its port. Raises RuntimeError if it ends with an error."""
    fake = ["--rate", str(rate), "--step", str(step), "--prompt", str(prompt)]
    with started([*SERVER, *fake, "--api-servers", str(api_servers)]) as (popen, port):
        yield popen, port
    check_status(popen)


if __name__ == "__main__":
    sys.exit(main())
