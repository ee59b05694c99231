"""A recording as one HTML page that needs nothing else: no network, no server, no other file.

`nanovllm trace view run.jsonl` writes run.html. Loads neither torch nor a model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

from nanovllm.trace_view.engine_state import EngineState
from nanovllm.trace_view.recording import Recording, add_texts

TEMPLATE = Path(__file__).with_name("page.html")
PLACE = "{{trace}}"
KEPT = ("step", "type", "tokens", "cached", "ids", "text", "reason", "taken")  # what the page needs of an event


def page(recording: Recording, decode: Callable[[list[int]], str] | None = None) -> str:
    """The page, with a scrubber over the steps: blocks by owner, queues, tokens.

    decode: makes text of token ids; without it the page shows the ids.
    """
    data = json.dumps(page_data(recording, decode), separators=(",", ":"))
    # "<" could end the script element that carries the data; "\u003c" is the same in JSON, and cannot.
    return TEMPLATE.read_text(encoding="utf-8").replace(PLACE, data.replace("<", "\\u003c"))


def page_data(recording: Recording, decode: Callable[[list[int]], str] | None) -> dict[str, Any]:
    """What the script of the page draws.

    steps: of each its number, time, tokens by phase, and how many blocks are in use while it runs.
    events: those of the recording. Each has the number of its sequence. What it changes is in it: `status` of its
    sequence, and `tables`, from a sequence to [how many of its blocks stay, the blocks that follow them].
    """
    state = EngineState()
    steps: dict[int, dict[str, Any]] = {}
    shown: dict[int, list[int]] = {}  # tables, as the page knows them by now
    events, num_blocks = [], 0
    for event in recording.events if decode is None else map(add_texts(decode), recording.events):
        step = event["step"]
        if event["type"] == "scheduled" and step not in steps:
            steps[step] = {"step": step, "t": event["t"] - recording.events[0]["t"], "used": len(state.owners)}
            steps[step] |= {"prefill": 0, "decode": 0, "again": 0}
        sequence = state.hear(event)
        num_blocks = max([num_blocks, *(block + 1 for block in event.get("taken", []) + event.get("shared", []))])
        told = {name: event[name] for name in KEPT if name in event} | {"sequence": sequence}
        if event["type"] == "scheduled":
            told["phase"] = state.phases[sequence]
            steps[step][told["phase"]] += event["tokens"]
        elif event["type"] in ("added", "admitted", "preempted", "finished"):
            told["status"] = state.status[sequence]
        if state.changed:
            told["tables"] = {}
            for changed in state.changed:
                old, new = shown.get(changed, []), state.tables.get(changed, [])
                kept = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False))))
                told["tables"][changed] = [kept, *new[kept:]]
                shown[changed] = list(new)
        events.append(told)
    return {
        "about": recording.about,
        "num_blocks": recording.about.get("num_blocks") or num_blocks,
        "names": state.labels(),
        "prompt_tokens": state.prompt_tokens,
        "steps": list(steps.values()),
        "events": events,
    }


def add_trace_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    view = commands.add_parser("view", help="write one HTML page with a scrubber over the steps")
    view.add_argument("recording", type=Path, help="a file that Recording.save wrote")
    view.add_argument("--out", type=Path, help="what to write (default: the recording's name with .html)")
    view.add_argument("--tokenizer", type=Path, help="tokenizer.json, or its directory: show text, not token ids")
    view.set_defaults(run=run_view)


def run_view(args: argparse.Namespace) -> None:
    decode = None
    if args.tokenizer is not None:
        from tokenizers import Tokenizer

        file = args.tokenizer / "tokenizer.json" if args.tokenizer.is_dir() else args.tokenizer
        if not file.is_file():
            raise ValueError(f"--tokenizer {args.tokenizer}: there is no such file, and no tokenizer.json in it")
        decode = Tokenizer.from_file(str(file)).decode
    out = args.out or args.recording.with_suffix(".html")
    out.write_text(page(Recording.load(args.recording), decode), encoding="utf-8")
    print(out)
