"""The server at full speed: streamed completions from several client processes, at rising rates.

    python -m benchmarks.serving.speed --out DIR [--rates 8 32 64 96] [--api-servers 1 4] [--vllm-path DIR]
    python -m benchmarks.serving.speed --draw benchmarks/results/serving_speed.h200.json    # the picture in docs

The model has random weights in the shape of Qwen3-0.6B, and SmolLM2's tokenizer (`make models`). Prompts are texts of
lognormal length, about 200 tokens, and answers have about 190. Arrivals are a Poisson process over all clients, so that
nobody waits for an answer before the next one asks. A client process reads bytes and finds the ends of events in them;
how busy the busiest one was is reported, for clients must not be the limit.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.lib import harness, tables, workloads
from benchmarks.lib.process import facts
from benchmarks.lib.tables import Result
from benchmarks.serving.load import AHEAD, HEAD, percentile, until
from benchmarks.serving.started import OURS, started
from tools.make_models import model_dir

CLIENTS = 8  # processes
MEAN_PROMPT, MEAN_OUTPUT, SIGMA = 200, 190, 0.6  # tokens; sigma of the logarithm of a length
TOKENIZER = model_dir()
FIGURE = harness.ROOT / "docs" / "figures" / "serving_speed.png"
README_RATE = 128  # requests a second; more than vLLM keeps up with
COLUMNS = ("server", "requests/s", "tokens/s", "gap p50 (ms)", "p99", "first token p50 (ms)", "p99", "commit")


def length(draw: random.Random, mean: float, most: int) -> int:
    return max(1, min(most, round(mean / 2.718281828 ** (SIGMA**2 / 2) * draw.lognormvariate(0, SIGMA))))


async def request(port: int, body: dict[str, Any], due: float, gaps: list[float]) -> dict[str, Any]:
    """One streamed answer. Times in seconds from when it was due; `gaps` gets those between its events."""
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    await until(due)
    writer.write(f"{HEAD}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    first, last, tail = None, 0.0, b""
    while data := await reader.read(2**16):
        now = time.perf_counter()
        if b'"text"' in data:
            if first is None:
                first = now - due
            else:
                gaps.append(now - last)
            last = now
        tail = (tail + data)[-2000:]
    writer.close()
    found = re.search(rb'"completion_tokens": ?(\d+)', tail)
    tokens = int(found[1]) if found else 0
    return {"tokens": tokens, "first": first, "finished": tokens == body["max_tokens"], "end": last}


async def client(port: int, rate: float, seconds: float, number: int, model: str) -> dict[str, Any]:
    """What one process sends and gets."""
    draw = random.Random(number)
    gaps: list[float] = []
    tasks = []
    start, due, busy = time.perf_counter() + AHEAD, 0.0, time.process_time()
    while (due := due + draw.expovariate(rate)) < seconds:
        await until(start + due - AHEAD)
        prompt = " ".join(draw.choice(WORDS) for _ in range(length(draw, MEAN_PROMPT, 1500)))
        body = {"model": model, "prompt": prompt, "max_tokens": length(draw, MEAN_OUTPUT, 1500), "stream": True}
        body |= {"ignore_eos": True, "temperature": 0.6, "stream_options": {"include_usage": True}}
        tasks.append(asyncio.create_task(request(port, body, start + due, gaps)))
    answers = await asyncio.gather(*tasks)
    lasted = max(seconds, *(answer["end"] - start for answer in answers)) if answers else seconds
    return {"answers": answers, "gaps": gaps, "lasted": lasted, "busy": (time.process_time() - busy) / lasted}


WORDS = "the of and to in is that it was for on are as with his they at be this from have or by one had not but".split()


def client_process(port: int, rate: float, seconds: float, number: int, model: str) -> dict[str, Any]:
    return asyncio.run(client(port, rate, seconds, number, model))


def at_rate(port: int, rate: float, seconds: float, model: str) -> dict[str, Any]:
    """All clients together. Times in ms; tokens/s over the time from the first request to the last answer."""
    with multiprocessing.get_context("spawn").Pool(CLIENTS) as pool:
        jobs = [(port, rate / CLIENTS, seconds, number, model) for number in range(CLIENTS)]
        parts = pool.starmap(client_process, jobs, chunksize=1)
    answers = [answer for part in parts for answer in part["answers"]]
    gaps = [1e3 * gap for part in parts for gap in part["gaps"]]
    first = [1e3 * answer["first"] for answer in answers if answer["first"] is not None]
    lasted = max(part["lasted"] for part in parts)
    return {
        "rate": rate,
        "requests": len(answers),
        "finished": sum(answer["finished"] for answer in answers),
        "tokens_per_second": sum(answer["tokens"] for answer in answers) / lasted,
        "gap_ms": {"p50": percentile(gaps, 0.5), "p99": percentile(gaps, 0.99)},
        "first_token_ms": {"p50": percentile(first, 0.5), "p99": percentile(first, 0.99)},
        "busiest_client": max(part["busy"] for part in parts),
    }


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def checkpoint(tokenizer: Path) -> Path:
    """Random weights of Qwen3-0.6B's shape with the vocabulary of another model's tokenizer."""
    made = workloads.random_checkpoint("Qwen3-0.6B", vocab_size=49_152)
    for file in tokenizer.glob("*token*.json"):
        shutil.copy(file, made)
    return made


def measure(options: argparse.Namespace, commit: str) -> list[dict[str, Any]]:
    model = str(options.model or checkpoint(options.tokenizer))
    name = "shape"
    contenders: list[tuple[str, list[str], str, int | None, dict[str, str]]] = []
    for number in options.api_servers:
        command = [sys.executable, "-m", "nanovllm.cli", "serve", model, "--port", "0", "--served-model-name", name]
        command += ["--api-servers", str(number), "--device", options.device]
        command += ["--max-queue", "100000", "--max-connections", "100000"]  # vLLM has no such limits
        contenders.append((f"nanovllm, {number} API", command, OURS, None, {}))
        if options.vllm_path:
            own = free_port()
            command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(own)]
            command += ["--served-model-name", name, "--max-model-len", "4096", "--api-server-count", str(number)]
            env = harness.ENVIRONMENT | {"PYTHONPATH": str(options.vllm_path)}
            contenders.append((f"vLLM, {number} API", command, "startup complete", own, env))
    rows = []
    for title, command, ready, chosen, env in contenders:
        with started(command, ready, subprocess.STDOUT, env) as (_, said):
            port = chosen or said
            at_rate(port, 16, 3, name)  # warm up
            for rate in options.rates:
                about = {"server": title, "commit": commit, "seconds": options.seconds}
                rows.append(about | at_rate(port, rate, options.seconds, name))
                print(row_of(rows[-1]), f"  busiest client {rows[-1]['busiest_client']:.2f}", flush=True)
    return rows


def row_of(row: dict[str, Any]) -> str:
    times = [tables.number(row[name][share], "ms") for name in ("gap_ms", "first_token_ms") for share in ("p50", "p99")]
    return tables.row(row["server"], f"{row['rate']:g}", f"{row['tokens_per_second']:,.0f}", *times, row["commit"])


def table(results: dict[str, Result]) -> list[str]:
    """A row for each server and rate."""
    result = results["serving_speed"]
    lines = [*tables.head(*COLUMNS), *map(row_of, result["rows"])]
    busiest = max(row["busiest_client"] for row in result["rows"])
    lost = sum(row["requests"] - row["finished"] for row in result["rows"])
    seconds = [row["seconds"] for row in result["rows"]]
    lines += ["", f"Workload: {result['workload']}; each rate for {min(seconds):g} to {max(seconds):g} s."]
    lines.append(f"{lost} requests got no whole answer. The busiest client used {100 * busiest:.0f}% of a core.")
    measured = [result["machine"]["device"], f"torch {result['machine']['torch']}"]
    return [*lines, "", f"Measured on {', '.join(measured)}."]


def short_row(result: Result) -> list[str]:
    """What the README says: ours beside vLLM, with as many API processes, those that are better for vLLM. Empty if that
    was not measured, or not at the same commit: a ratio is of one call."""
    rows = [row for row in result["rows"] if row["rate"] == README_RATE]
    rates = {(row["server"], row["commit"]): row["tokens_per_second"] for row in rows}
    rivals = [(server, commit) for server, commit in rates if server.startswith("vLLM")]
    pairs = {rates[s, c]: rates.get((s.replace("vLLM", "nanovllm"), c)) for s, c in rivals}
    theirs = max(pairs, default=0.0)
    mine = pairs.get(theirs)
    if mine is None:
        return []
    title = f"output tokens per second of the server, {README_RATE} requests per second"
    return [title, f"{mine:,.0f}", f"{theirs:,.0f}", f"{mine / theirs:.2f}×"]


def draw(result: Result, path: Path) -> None:
    """Throughput and the longest gaps against the rate, a line for each server; legible at half the page's width."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot as plt

    with plt.rc_context({"font.size": 14}):
        canvas, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
        for server in dict.fromkeys(row["server"] for row in result["rows"]):
            rows = sorted((row for row in result["rows"] if row["server"] == server), key=lambda row: row["rate"])
            ours, alone = server.startswith("nanovllm"), ", 1 API" in server
            look: dict[str, Any] = {"color": "#0072B2" if ours else "#D55E00", "linestyle": "--" if alone else "-"}
            look |= {"marker": "o" if ours else "s", "label": server.replace("API", "API process" + "es" * (not alone))}
            rates = [row["rate"] for row in rows]
            left.plot(rates, [row["tokens_per_second"] for row in rows], **look)
            right.plot(rates, [row["gap_ms"]["p99"] for row in rows], **look)
        left.set_ylabel("output tokens per second")
        left.set_ylim(bottom=0)
        right.set_ylabel("gap between tokens, 99th percentile (ms)")
        right.set_ylim(bottom=0)
        right.legend(frameon=False, loc="upper left")
        for axes in (left, right):
            axes.set_xlabel("requests per second")
            axes.spines[["top", "right"]].set_visible(False)
        # No version of matplotlib in the file, so that drawing the same result again gives the same bytes
        canvas.savefig(path, dpi=100, metadata={"Software": None})
        plt.close(canvas)


def with_others(result: Result, path: Path) -> Result:
    """The result, with what the file has of other servers and rates, on the same card with the same workload."""
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["workload"] == result["workload"] and found["machine"]["device"] == result["machine"]["device"]:
            measured = {(row["server"], row["rate"]) for row in result["rows"]}
            result["rows"] += [row for row in found["rows"] if (row["server"], row["rate"]) not in measured]
            result["rows"].sort(key=lambda row: (row["server"], row["rate"]))
    return result


def main(arguments: list[str] | None = None) -> None:
    parser = harness.make_parser("serving.speed", __doc__)
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    parser.add_argument("--model", type=Path, help="a checkpoint (default: made, see above)")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rates", type=float, nargs="+", default=[8, 32, 64, 96], help="requests a second")
    parser.add_argument("--seconds", type=float, default=20, help="how long each rate is kept up (default 20)")
    parser.add_argument("--api-servers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--vllm-path", type=Path, help="where vLLM can be imported from")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw this result for docs, and measure nothing")
    options = parser.parse_args(arguments)
    if options.draw is not None:
        draw(json.loads(options.draw.read_text(encoding="utf-8")), FIGURE)
        return
    result: Result = {
        "name": "serving_speed",
        "machine": facts(options.device),
        "commit": harness.commit("nanovllm", "benchmarks/serving/*.py"),
        "workload": f"{CLIENTS} client processes, streamed completions, lognormal lengths, about {MEAN_PROMPT} tokens "
        f"in and {MEAN_OUTPUT} out, temperature 0.6, Qwen3-0.6B's shape with a vocabulary of 49,152",
    }
    result["rows"] = measure(options, tables.commit(result))
    path = harness.result_path("serving_speed", result["machine"]["device"], options.out)
    harness.write_json(with_others(result, path), path)


if __name__ == "__main__":
    main()
