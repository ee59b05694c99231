"""A recording as one HTML page that needs nothing else: no network, no server, no other file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from nanovllm.trace_view.recording import Event, Recording

TEMPLATE = Path(__file__).with_name("page.html")
PLACE = "{{trace}}"


def page(recording: Recording, decode: Callable[[list[int]], str] | None = None) -> str:
    """The page, with a scrubber over the steps: blocks by owner, queues, tokens.

    decode: makes text of token ids; without it the page shows the ids.
    """
    events = recording.events if decode is None else with_texts(recording.events, decode)
    # "<" could end the script element that carries the data; "\u003c" is the same in JSON, and cannot.
    data = json.dumps({"about": recording.about, "events": events}, separators=(",", ":")).replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace(PLACE, data)


def with_texts(events: list[Event], decode: Callable[[list[int]], str]) -> list[Event]:
    """The events, where each `token` has the `text` that it adds; half a character waits for its other half."""
    so_far: dict[tuple[object, int], list[int]] = {}
    shown: dict[tuple[object, int], int] = {}
    out = []
    for event in events:
        who = event["request"], event.get("choice", 0)
        if event["type"] == "added":
            so_far[who], shown[who] = [], 0
        elif event["type"] == "token":
            so_far[who] = so_far.get(who, []) + event["ids"]
            whole = decode(so_far[who]).rstrip("\ufffd")
            event = event | {"text": whole[shown.get(who, 0) :]}
            shown[who] = max(shown.get(who, 0), len(whole))
        out.append(event)
    return out
