"""Load test of `nanovllm serve`: requests that arrive at random, at rising rates, and some clients that misbehave.

    python -m benchmarks.serving.load [--model DIR] [--rates 1 2 4 8] [--seconds 30] [--quick] [--out FILE]

The server is a process of its own on a free port of loopback. Arrivals are a Poisson process: nobody waits for an
answer before the next one asks, so a server that is too slow gets a growing queue and not a gentler load. One request
in ten vanishes, before its first token or in mid-stream, and one in twenty is malformed. The last rate runs twice:
after it every request must have had its answer, and the engine must be idle with all blocks free, with hardly more
memory than after the first time.

*Goodput* is what counts for users: finished requests a second whose first token came within --slo-first seconds and
whose tokens took --slo-token seconds each at most (the notion is DistServe's, Zhong et al. 2024).
"""

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.lib import harness, tables
from benchmarks.lib.harness import EMBEDDED_MODEL, RESULTS
from benchmarks.lib.process import facts
from benchmarks.lib.tables import Result
from benchmarks.serving.started import check_status, started

AHEAD = 0.02  # seconds before a request is due: its body is made and its connection opened, and neither is timed
LONGEST_RUN = 540  # seconds of load, so that a run stays under ten minutes with start and end
MAX_THREADS = 60  # torch's and those in which asyncio lets prompts be tokenized, 32 at most
MAX_GROWTH_MIB = 32.0  # of the server's memory from one round at the highest rate to the next
COLUMNS = ("requests/s", "sent", "finished", "first token (ms)", "p99", "a token (ms)", "p99", "tokens/s", "goodput/s")

RUNNING, WAITING, KV_USAGE = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close"

Behaviour = Literal["served", "vanishes", "malformed"]
SHARES: dict[Behaviour, float] = {"served": 0.85, "vanishes": 0.10, "malformed": 0.05}


@dataclass
class ServerProcess:
    """What can be seen of the server from outside."""

    popen: subprocess.Popen[str]
    port: int

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as response:
            text = response.read().decode()
        return {name: float(value) for name, value in re.findall(r"^([^#{]+)\S* (\S+)$", text, re.MULTILINE)}

    def process_status(self) -> dict[str, float]:
        """Memory in MiB and the number of threads of all its processes; empty where there is no /proc."""
        parent = self.popen.pid
        if not Path(f"/proc/{parent}/status").exists():
            return {}
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        memory, threads = 0, 0
        for pid in [parent, *children]:
            text = Path(f"/proc/{pid}/status").read_text()
            numbers = {key: int(value) for key, value in re.findall(r"^(VmRSS|Threads):\s+(\d+)", text, re.MULTILINE)}
            memory, threads = memory + numbers["VmRSS"], threads + numbers["Threads"]
        return {"memory_mib": memory / 1024, "threads": threads}

    def wait_idle(self, seconds: float = 60) -> dict[str, float]:
        """The metrics once nothing runs or waits. Raises TimeoutError if it does not come to that."""
        deadline = time.monotonic() + seconds
        while (metrics := self.metrics())[RUNNING] or metrics[WAITING]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the engine is not idle after {seconds} s: {metrics}")
            time.sleep(0.1)
        return metrics


# --- clients: over bare sockets, so that hundreds of them fit in the process that makes the load ----------------------


@dataclass
class Record:
    """What became of a request. Times are in seconds from when it was due, so that a late client counts as waiting."""

    behaviour: Behaviour
    status: int = 0  # of HTTP; 0 if there was no answer
    num_tokens: int = 0
    first_token: float | None = None
    last_token: float | None = None
    finished: bool = False

    @property
    def token_time(self) -> float | None:
        """Seconds a token after the first."""
        if self.first_token is None or self.last_token is None or self.num_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.num_tokens - 1)


async def request(port: int, behaviour: Behaviour, body: dict[str, Any], due: float, leave_after: int) -> Record:
    """Send a streaming completion and read it; `leave_after` so many tokens, if it is one that vanishes (0: at once).

    due: when it should have been sent, in seconds of `time.perf_counter()`.
    """
    record = Record(behaviour)
    content = json.dumps(body).encode()
    if behaviour == "malformed":
        content = content[: len(content) // 2]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        await until(due)
        writer.write(f"{HEAD}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        if behaviour == "vanishes" and leave_after == 0:
            await writer.drain()
            await asyncio.sleep(0.01)
            return record
        record.status = int((await reader.readuntil(b" ") and await reader.readuntil(b" ")).strip() or 0)
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            now = time.perf_counter() - due
            for choice in chunk.get("choices", []):
                record.num_tokens += 1  # about: a chunk is a token or, for a slow reader or a split character, some
                record.first_token = now if record.first_token is None else record.first_token
                record.last_token = now
                record.finished = choice["finish_reason"] is not None
            if chunk.get("usage"):
                record.num_tokens = chunk["usage"]["completion_tokens"]
            if behaviour == "vanishes" and record.num_tokens >= leave_after:
                break
    finally:
        writer.transport.abort()
    return record


async def until(due: float) -> None:
    """Sleep until `due`, in seconds of `time.perf_counter`. An event loop may wake a millisecond late. So for the last
    millisecond this looks at the clock again and again, in turn with the other tasks."""
    await asyncio.sleep(due - time.perf_counter() - 0.001)
    while time.perf_counter() < due:
        await asyncio.sleep(0)


async def load(port: int, rate: float, seconds: float, draw: random.Random, highest_id: int) -> list[Record]:
    """Poisson arrivals for so many seconds, then wait for the answers."""
    start, due, tasks = time.perf_counter() + AHEAD, 0.0, []
    while (due := due + draw.expovariate(rate)) < seconds:
        await until(start + due - AHEAD)
        prompt = [draw.randrange(1, highest_id) for _ in range(draw.randint(16, 128))]
        body = {"prompt": prompt, "max_tokens": draw.randint(8, 64), "stream": True, "ignore_eos": True}
        body["stream_options"] = {"include_usage": True}
        [chosen] = draw.choices(list(SHARES), list(SHARES.values()))
        leave_after = draw.randint(0, 6)
        tasks.append(asyncio.create_task(request(port, chosen, body, start + due, leave_after)))
    return list(await asyncio.gather(*tasks))


def percentile(values: list[float], share: float) -> float | None:
    """The smallest value that at least this share of all does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else None


def summarize(rate: float, seconds: float, records: list[Record], slo: tuple[float, float]) -> dict[str, Any]:
    """Times in ms. `seconds` is how long requests kept arriving."""
    served = [record for record in records if record.behaviour == "served"]
    finished = [record for record in served if record.finished]
    first = [1e3 * record.first_token for record in finished if record.first_token is not None]
    token = [1e3 * record.token_time for record in finished if record.token_time is not None]
    good = [r for r in finished if (r.first_token or 0) <= slo[0] and (r.token_time or 0) <= slo[1]]
    lasted = max([seconds, *(record.last_token or 0 for record in finished)])
    return {
        "rate": rate,
        "requests": len(records),
        "vanished": sum(record.behaviour == "vanishes" for record in records),
        "malformed": sum(record.behaviour == "malformed" for record in records),
        "refused": sum(record.status == 429 for record in served),
        "finished": len(finished),
        "first_token_ms": {"p50": percentile(first, 0.5), "p99": percentile(first, 0.99)},
        "token_ms": {"p50": percentile(token, 0.5), "p99": percentile(token, 0.99)},
        "goodput": len(good) / seconds,
        "output_tokens_per_second": sum(record.num_tokens for record in finished) / lasted,
    }


def complaints(
    records: list[Record], before: dict[str, float], after: dict[str, float], idle: dict[str, float]
) -> list[str]:
    """What must not be: lost requests, wrong statuses, and anything left over."""
    wrong = [r for r in records if r.behaviour == "malformed" and r.status != 400]
    lost = [r for r in records if r.behaviour == "served" and not r.finished and r.status != 429]
    found = [f"{len(wrong)} malformed requests did not get a 400"] if wrong else []
    found += [f"{len(lost)} requests got no whole answer"] if lost else []
    found += ["KV blocks are not free"] if idle[KV_USAGE] else []
    if before and after["memory_mib"] - before["memory_mib"] > MAX_GROWTH_MIB:
        found.append(f"memory grew from {before['memory_mib']:.0f} to {after['memory_mib']:.0f} MiB")
    if after and after["threads"] > MAX_THREADS:
        found.append(f"the server has {after['threads']:.0f} threads")
    return found


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The result, and what is wrong."""
    draw = random.Random(0)
    phases: list[dict[str, Any]] = []
    all_records: list[Record] = []
    status: dict[str, float] = {}
    print(*tables.head(*COLUMNS, left=0)[:1], flush=True)
    command = [sys.executable, "-m", "nanovllm.cli", "serve", str(options.model), "--port", "0", *options.serve]
    with started(command) as (popen, port):
        process = ServerProcess(popen, port)
        asyncio.run(load(process.port, 4, 2, draw, options.highest_id))  # warm up
        process.wait_idle()
        for rate in [*options.rates, options.rates[-1]]:
            before, records = status, asyncio.run(load(process.port, rate, options.seconds, draw, options.highest_id))
            idle, status = process.wait_idle(), process.process_status()
            all_records += records
            phases.append(summarize(rate, options.seconds, records, (options.slo_first, options.slo_token)))
            print(row_of(phases[-1]), flush=True)
        wrong = complaints(all_records, before, status, idle)
    check_status(popen)
    result = {
        "name": "serving",
        "machine": facts(options.device),
        "commit": harness.commit("nanovllm", "benchmarks/serving/*.py"),
        "model": {"name": harness.model_name(options.model)},
        "workload": "prompts of 16 to 128 random tokens, 8 to 64 to generate; 10% vanish, 5% are malformed",
        "slo": {"first_token_s": options.slo_first, "token_s": options.slo_token},
        "seconds": options.seconds,
        "phases": phases,
        "memory_mib": {"before": before.get("memory_mib"), "after": status.get("memory_mib")},
        "complaints": wrong,
    }
    return result, wrong


def row_of(phase: dict[str, Any]) -> str:
    """The figures of a rate, in the order of `COLUMNS`."""
    times = [phase[name][share] for name in ("first_token_ms", "token_ms") for share in ("p50", "p99")]
    shown = ["–" if time is None else tables.number(time, "ms") for time in times]
    rates = [tables.number(phase[name], "1/s") for name in ("output_tokens_per_second", "goodput")]
    return tables.row(f"{phase['rate']:g}", str(phase["requests"]), str(phase["finished"]), *shown, *rates)


def table(results: dict[str, Result]) -> list[str]:
    """A row for each rate: medians and 99th percentiles."""
    result = results["serving"]
    lines = [*tables.head(*COLUMNS, left=0), *map(row_of, result["phases"])]
    facts, slo, memory = result["machine"], result["slo"], result["memory_mib"]
    lines += ["", f"Workload: {result['workload']}; each rate for {result['seconds']:g} s, the last one twice."]
    lines.append(
        f"Times are medians and 99th percentiles. Goodput is what finished with its first token within "
        f"{slo['first_token_s']:g} s and {slo['token_s']:g} s a token."
    )
    if memory["before"] is not None:
        grown = memory["after"] - memory["before"]
        lines.append(f"The last round left the server's memory at {memory['after']:.0f} MiB ({grown:+.1f}).")
    lines += [f"It went wrong: {complaint}." for complaint in result["complaints"]]
    where = facts["processor"] if facts["device"] == "cpu" else facts["device"]
    threads = f"{facts['threads']} thread{'s' if facts['threads'] > 1 else ''}"
    measured = [where, threads, f"torch {facts['torch']}; {result['model']['name']}"]
    return [*lines, "", f"Measured on {', '.join(measured)}; commit {tables.commit(result)}."]


def main(arguments: list[str] | None = None) -> int:
    parser = harness.make_parser("serving.load", __doc__)
    parser.add_argument("--model", type=Path, default=EMBEDDED_MODEL)
    parser.add_argument("--device", default="cpu", help="cpu or cuda, for the server and the name of the result")
    parser.add_argument("--rates", type=float, nargs="+", default=[1, 2, 4, 8, 16], help="requests a second, rising")
    parser.add_argument("--seconds", type=float, default=30, help="how long each rate is kept up (default 30)")
    parser.add_argument("--slo-first", type=float, default=1.0, help="seconds to the first token (default 1)")
    parser.add_argument("--slo-token", type=float, default=0.1, help="seconds a token (default 0.1)")
    parser.add_argument("--highest-id", type=int, default=500, help="token ids of the prompts are below it")
    parser.add_argument("--quick", action="store_true", help="two low rates of two seconds: does it work at all?")
    parser.add_argument("--out", type=Path, help="where the result goes (default: benchmarks/results)")
    parser.add_argument("serve", nargs="*", help="more options for nanovllm serve, after --")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rates, options.seconds = [4.0, 8.0], 2.0
    if (len(options.rates) + 1) * options.seconds > LONGEST_RUN:
        parser.error(f"{len(options.rates) + 1} rates of {options.seconds} s are more than {LONGEST_RUN} s")
    options.serve = ["--device", options.device, "--kv-cache-gib", "0.05", *options.serve]
    result, wrong = run(options)
    out = options.out or harness.result_path("serving", result["machine"]["device"], RESULTS)
    if not options.quick or options.out:
        harness.write_json(result, out)
    for complaint in wrong:
        print(f"benchmarks.serving.load: {complaint}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
