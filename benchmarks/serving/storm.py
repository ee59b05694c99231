"""Endurance of `nanovllm serve`: streams of which a quarter is cancelled, beside silent connections.

    python -m benchmarks.serving.storm [--model DIR] [--seconds 600] [--streams 32] [--silent 500] [-- SERVE OPTIONS]

Every stream asks one of a few questions again and again. A quarter of the answers is given up at a random token. All
other answers must be whole, and equal to the answer that the question got alone at the start. The silent connections
send nothing, and come again when the server closes them. In the end nothing may run or wait, all blocks must be free,
and the server may not have grown: its memory at the end is compared with its memory when a fifth of the time had
passed. Exits with status 1 if something of this does not hold.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path

from benchmarks.lib.harness import EMBEDDED_MODEL, make_parser
from benchmarks.serving.load import HEAD, KV_USAGE, ServerProcess, server

MAX_GROWTH = 0.02  # of the server's memory, as a share
NUM_QUESTIONS = 40


def question(number: int) -> dict[str, object]:
    """Sampled, so that an answer that follows another request's random numbers would be another."""
    draw = random.Random(number)
    prompt = [draw.randrange(1, 500) for _ in range(draw.randint(4, 80))]
    return {"prompt": prompt, "max_tokens": draw.randint(16, 96), "seed": number, "ignore_eos": True, "stream": True}


async def pieces(port: int, body: dict[str, object]) -> AsyncGenerator[str]:
    """The pieces of an answer's text. Raises ConnectionError if the stream ends without `[DONE]`."""
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"{HEAD}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]
        raise ConnectionError("the stream ended early")
    finally:
        writer.transport.abort()


async def ask(port: int, number: int, expected: dict[int, str], draw: random.Random, counts: Counter[str]) -> None:
    leave_after = draw.randint(0, 20) if draw.random() < 0.25 else None
    text, stream = "", pieces(port, question(number))
    try:
        async for piece in stream:
            text += piece
            counts["pieces"] += 1
            if leave_after is not None and (leave_after := leave_after - 1) < 0:
                counts["cancelled"] += 1
                return
    except (OSError, asyncio.IncompleteReadError):
        counts["lost"] += 1
        return
    finally:
        await stream.aclose()
    counts["whole" if text == expected[number] else "wrong"] += 1


async def silence(port: int, counts: Counter[str]) -> None:
    """A connection that says nothing, for ever."""
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await reader.read()  # until the server closes it
            writer.close()
        counts["silent"] += 1


async def storm(served: ServerProcess, options: argparse.Namespace) -> list[str]:
    """Hold it. Returns what does not hold."""
    port, counts, draw = served.port, Counter[str](), random.Random(0)
    expected = {n: "".join([piece async for piece in pieces(port, question(n))]) for n in range(NUM_QUESTIONS)}
    end = time.monotonic() + options.seconds

    async def stream() -> None:
        while time.monotonic() < end:
            await ask(port, draw.randrange(NUM_QUESTIONS), expected, draw, counts)

    silent = [asyncio.create_task(silence(port, counts)) for _ in range(options.silent)]
    streams = [asyncio.create_task(stream()) for _ in range(options.streams)]
    await asyncio.sleep(options.seconds / 5)
    before = await asyncio.to_thread(served.process_status)
    await asyncio.gather(*streams)
    for task in silent:
        task.cancel()
    metrics, after = await asyncio.to_thread(served.wait_idle), await asyncio.to_thread(served.process_status)
    growth = after["memory_mib"] / before["memory_mib"] - 1 if after else 0.0
    print(f"{dict(counts)}; memory {growth:+.1%} of {before.get('memory_mib', 0):.0f} MiB")
    found = [f"{counts[name]} answers {name}" for name in ("lost", "wrong") if counts[name]]
    found += [] if counts["whole"] and counts["cancelled"] else ["nothing was whole, or nothing cancelled"]
    found += [f"memory grew by {growth:.1%}"] if growth > MAX_GROWTH else []
    found += [f"{metrics[KV_USAGE]:.1%} of the blocks are held by nobody"] if metrics[KV_USAGE] else []
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("serving.storm", __doc__)
    parser.add_argument("--model", type=Path, default=EMBEDDED_MODEL)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--silent", type=int, default=500, help="connections that say nothing")
    parser.add_argument("serve", nargs="*", help="options for nanovllm serve, after --")
    options = parser.parse_args(arguments)
    options.serve = ["--log-level", "warning", *options.serve]
    with server(options) as served:
        found = asyncio.run(storm(served, options))
    for line in found:
        print(f"does not hold: {line}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
