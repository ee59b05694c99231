"""A recording: the events of a run (see `engine/trace.py`), in memory and in a file with one JSON object a line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Event = dict[str, Any]
FORMAT = 1
NEEDED = ("t", "step", "type", "request")  # what every event has


class Recording:
    """Listens to one engine, of the package or of a stage, and keeps all that it hears.

        trace = Recording(block_size=16, num_blocks=64)
        llm = LLM(on_event=trace, ...)
        llm.generate("Once upon a time")
        trace.save("run.jsonl")

    about: whatever should be known of the run later on. Of use to the page are `title`, `block_size` and `num_blocks`;
    without the last one it shows the blocks that were ever used.
    The file holds the generated token ids, so it is as private as the texts.
    """

    def __init__(self, events: Iterable[Event] = (), **about: Any) -> None:
        self.events = list(events)
        self.about = about

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all; packed if its name ends in .gz. Equal recordings give equal bytes."""
        path = Path(path)
        lines = [{"nanovllm_trace": FORMAT, **self.about}, *self.events]
        text = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)
        part = path.with_name(path.name + ".part")
        part.write_bytes(gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode())
        part.replace(path)

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
