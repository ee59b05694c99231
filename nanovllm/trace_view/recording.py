"""A recording: the events of a run (see `engine/trace.py`), in memory and in a file with one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterable
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
        """Write the file, whole or not at all."""
        lines = [{"nanovllm_trace": FORMAT, **self.about}, *self.events]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """Raises ValueError, with the number of the line, for a file that is no recording or is damaged."""
        about: dict[str, Any] = {}
        events: list[Event] = []
        for number, text in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
            try:
                line = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: no JSON ({error.msg}); record the run again") from None
            if number == 1:
                if not isinstance(line, dict) or line.pop("nanovllm_trace", None) != FORMAT:
                    break
                about = line
            elif not isinstance(line, dict) or not line.keys() >= set(NEEDED):
                raise ValueError(f"{path}, line {number}: an event has {', '.join(NEEDED)}; got {text[:60]}")
            else:
                events.append(line)
        else:
            if events:
                return cls(events, **about)
        raise ValueError(f"{path} is no recording with events; write one with Recording.save")
