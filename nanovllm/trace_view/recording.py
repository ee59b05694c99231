"""A recording: the events of a run (see `engine/trace.py`), in memory, in a file, and as one page of HTML.

The file has one JSON object per line. The page needs nothing else: no network, no server, no other file.
`nanovllm trace view run.jsonl` writes run.html, and loads neither torch nor a model.
"""

from __future__ import annotations

import argparse
import gzip
import json
import zlib
from collections.abc import Callable, Iterable
from itertools import takewhile
from pathlib import Path
from typing import Any

from nanovllm.trace_view.engine_state import EngineState, Event
from nanovllm.trace_view.reasons import Reasons

FORMAT = 1
NEEDED = ("t", "step", "type", "request")  # what every event has
TEMPLATE, PARTS = Path(__file__).with_name("page.html"), Path(__file__).with_name("parts.js")
KEPT = "t step type tokens cached ids text reason taken why".split()  # what the page needs of an event


class Recording:
    """Listens to one engine, of the package or of a stage, and keeps all that it hears.

        trace = Recording(block_size=16, num_blocks=64)
        llm = LLM(on_event=trace, ...)
        llm.generate("Once upon a time")
        trace.save("run.jsonl")

    about: whatever should be known of the run later on. Of use to the page are `title`, `block_size`, `num_blocks`,
    `max_num_seqs`, `max_num_batched_tokens` and `enable_chunked_prefill` (True if not given); without `num_blocks` it
    shows the blocks that were ever used, and without the others it cannot always say why a request waits.
    The file holds the generated token ids, so it is as private as the texts.
    """

    def __init__(self, events: Iterable[Event] = (), **about: Any) -> None:
        self.events = list(events)
        self.about = about

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all; packed if its name ends in .gz. Equal recordings give equal bytes.

        A link stays a link. A device or a pipe, such as /dev/null, is written to, and not replaced by a file.
        """
        path = Path(path)
        lines = [{"nanovllm_trace": FORMAT, **self.about}, *self.events]
        text = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)
        content = gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode()
        if path.exists() and (not path.is_file() or Path("/dev") in path.absolute().parents):
            with path.open("ab") as file:  # /dev/stdout may be a file that has more in it
                file.write(content)
            return
        path = path.resolve()
        part = path.with_name(path.name + ".part")
        try:
            part.write_bytes(content)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)  # of a full disk

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """Raises ValueError, in one line with what to do, for a file that is no recording or is damaged."""
        path = Path(path)
        content = path.read_bytes()
        try:
            lines = (gzip.decompress(content) if path.suffix == ".gz" else content).decode().splitlines()
        except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError):
            kind = "gzip file" if path.suffix == ".gz" else "text"
            raise ValueError(f"{path} is no {kind}, or is cut short or damaged; record the run again") from None
        about: dict[str, Any] = {}
        events: list[Event] = []
        for number, text in enumerate(lines, start=1):
            try:
                line = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: no JSON ({error.msg}); record the run again") from None
            if number == 1:
                if not isinstance(line, dict) or line.pop("nanovllm_trace", None) != FORMAT:
                    break
                about = line
            elif not isinstance(line, dict) or not line.keys() >= set(NEEDED):
                wanted = f"an event has {', '.join(NEEDED)}, unlike {text[:60]}"
                raise ValueError(f"{path}, line {number}: {wanted}; record the run again")
            else:
                events.append(line)
        if not events:
            raise ValueError(f"{path} is no recording with events; record the run again")
        return cls(events, **about)


def add_texts(decode: Callable[[list[int]], str]) -> Callable[[Event], Event]:
    """A function for the events of a run, in their order: each `token` gets the `text` that it adds to its sequence.

    Half a character waits for its other half.
    """
    so_far: dict[tuple[object, int], list[int]] = {}
    shown: dict[tuple[object, int], int] = {}

    def with_text(event: Event) -> Event:
        who = event["request"], event.get("choice", 0)
        if event["type"] == "added":
            so_far[who], shown[who] = [], 0
        elif event["type"] == "token":
            so_far[who] = so_far.get(who, []) + event["ids"]
            whole = decode(so_far[who]).rstrip("\ufffd")
            event = event | {"text": whole[shown.get(who, 0) :]}
            shown[who] = max(shown.get(who, 0), len(whole))
        return event

    return with_text


def page(recording: Recording, decode: Callable[[list[int]], str] | None = None) -> str:
    """The page, with a scrubber over the steps: blocks by owner, queues, tokens.

    decode: makes text of token ids; without it the page shows the ids.
    """
    template = TEMPLATE.read_text(encoding="utf-8").replace("{{parts}}", PARTS.read_text(encoding="utf-8"))
    # "<" could end the script element that carries the data; "\u003c" is the same in JSON, and cannot.
    data = json.dumps(page_data(recording, decode), separators=(",", ":")).replace("<", "\\u003c")
    return template.replace("{{trace}}", data)


def page_data(recording: Recording, decode: Callable[[list[int]], str] | None) -> dict[str, Any]:
    """What the script of the page draws.

    steps: of each its number, time, tokens by phase, how many blocks are in use while it runs, and `waits`: who is the
    first of those that wait, and why.
    events: those of the recording, times from the first on. Each has the number of its sequence. What it changes is in
    it: `status` of its sequence, and `tables`, from a sequence to [how many of its blocks stay, the blocks that follow
    them]. That of a preemption says `why`.
    num_touched: no block from this number on was ever used.
    """
    state = EngineState()
    steps: dict[int, dict[str, Any]] = {}
    shown: dict[int, list[int]] = {}  # tables, as the page knows them by now
    events, num_blocks = [], 0
    reasons = Reasons(state, recording.about)
    for event in recording.events if decode is None else map(add_texts(decode), recording.events):
        step = event["step"]
        if event["type"] == "scheduled" and step not in steps:
            steps[step] = {"step": step, "t": event["t"] - recording.events[0]["t"], "used": len(state.owners)}
            steps[step] |= {"prefill": 0, "decode": 0, "again": 0}
        sequence = state.hear(event)
        why = reasons.hear(event, sequence)
        num_blocks = max([num_blocks, *(block + 1 for block in event.get("taken", []) + event.get("shared", []))])
        told = {name: event[name] for name in KEPT if name in event} | {"sequence": sequence}
        told["t"] = round(told["t"] - recording.events[0]["t"], 6)
        if event["type"] == "scheduled":
            told["phase"] = state.phases[sequence]
            steps[step][told["phase"]] += event["tokens"]
            steps[step]["waits"] = reasons.first_in_line()
        elif event["type"] in ("added", "admitted", "preempted", "finished"):
            told["status"] = state.status[sequence]
            told |= {"why": why} if why else {}
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
        "num_touched": num_blocks,
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
