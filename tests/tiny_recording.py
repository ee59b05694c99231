"""A recording made by hand: two requests, one after the other, three steps."""

from __future__ import annotations

from typing import Any

from tools.race.workload import EngineRun, Race, Workload

WORDS = {7: "once", 8: " upon", 9: " é", 10: "”"}
WORKLOAD = Workload(0, [[1, 2, 3], [1, 2]], [3, 2], kv_slots=64)
RACE = Race(
    made="2026-11-28",
    machine={"device": "NVIDIA H100 80GB HBM3", "processor": "some CPU", "clock": "wall"},
    commit={"hash": "abc123", "modified": False},
    model="assets/story_model",
    together=False,
    workload=WORKLOAD,
)


def decode(ids: list[int]) -> str:
    return "".join(WORDS[i] for i in ids)


def event(t: float, step: int, kind: str, request: int, **details: Any) -> dict[str, Any]:
    return {"t": t, "step": step, "type": kind, "request": request} | details


def tiny(engine: str = "stage_4", title: str = "4 Prefix caching", slower: float = 1.0) -> EngineRun:
    events = [
        event(0.0, 0, "added", 0, prompt_tokens=3),
        event(0.0, 0, "added", 1, prompt_tokens=2),
        event(0.1, 1, "blocks", 0, taken=[0], shared=[], freed=[]),
        event(0.1, 1, "admitted", 0, cached=0),
        event(0.1, 1, "scheduled", 0, tokens=3, cached=0),
        event(0.2, 1, "token", 0, ids=[7, 8]),
        event(0.3, 2, "scheduled", 0, tokens=1, cached=4),
        event(0.4, 2, "token", 0, ids=[9]),
        event(0.4, 2, "finished", 0, reason="length"),
        event(0.4, 2, "blocks", 0, taken=[], shared=[], freed=[0]),
        event(0.5, 3, "blocks", 1, taken=[1], shared=[], freed=[]),
        event(0.5, 3, "admitted", 1, cached=0),
        event(0.5, 3, "scheduled", 1, tokens=2, cached=0),
        event(0.6, 3, "token", 1, ids=[10, 7]),
        event(0.6, 3, "finished", 1, reason="length"),
        event(0.6, 3, "blocks", 1, taken=[], shared=[], freed=[1]),
    ]
    events = [e | {"t": e["t"] * slower} for e in events]
    return EngineRun.from_result(engine, title, {"events": events, "seconds": 0.65 * slower}, RACE, decode)
