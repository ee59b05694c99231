"""The workloads of the benchmarks, and what is read off a run: memory, tokens and times."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.lib.process import choose_clock
from benchmarks.lib.workloads import Request, Scenario, make_requests, mixed_lengths, share_prefix
from benchmarks.stages.runners import CallRecorder, metrics


def test_workloads_come_from_their_seed() -> None:
    lengths = mixed_lengths(12, (4, 9), (2, 5), seed=1, long_every=4, long=10)
    assert lengths == mixed_lengths(12, (4, 9), (2, 5), seed=1, long_every=4, long=10)
    assert [p for p, _ in lengths if p >= 40] == [p for p, _ in lengths[3::4]]
    requests = make_requests(lengths, 50, seed=2)
    assert requests != make_requests(lengths, 50, seed=3)
    assert [(len(r.prompt), r.max_tokens) for r in requests] == lengths
    shared = share_prefix(requests, 5, 50, seed=4)
    assert {tuple(r.prompt[:5]) for r in shared} == {tuple(shared[0].prompt[:5])}
    assert [r.prompt[5:] for r in shared] == [r.prompt for r in requests]


def test_the_same_memory_is_blocks_for_one_and_rows_for_another() -> None:
    scenario = Scenario("s", [[Request([1] * 20, 12), Request([1] * 5, 4)]], kv_slots=100, max_num_seqs=4)
    assert scenario.num_blocks == 6
    assert [scenario.num_rows(n) for n in (10, 32, 51, 200)] == [4, 3, 1, 1]
    ample = Scenario("s", scenario.calls)
    assert ample.num_blocks == 2 + 1
    assert Scenario.from_json(json.loads(json.dumps(asdict(scenario)))) == scenario


def event(type: str, request: int, **details: Any) -> dict[str, Any]:
    return {"t": 0.0, "step": 0, "type": type, "request": request, **details}


def test_memory_is_read_off_the_events() -> None:
    requests = [Request([1] * 5, 2), Request([1] * 5, 1)]
    recorder = CallRecorder(requests, 4, "wall")
    recorder.on_event(event("blocks", 0, taken=[7, 8], shared=[], freed=[]))
    recorder.on_event(event("blocks", 1, taken=[9], shared=[7], freed=[]))
    recorder.on_event(event("preempted", 1, tokens=5))
    recorder.on_event(event("blocks", 1, taken=[], shared=[], freed=[9]))
    recorder.on_event(event("blocks", 1, taken=[9, 3], shared=[], freed=[]))
    for request in (0, 0, 1):
        recorder.on_event(event("token", request, ids=[1]))
    for request, freed in ((0, [7, 8]), (1, [9, 3])):
        recorder.on_event(event("finished", request, reason="length"))
        recorder.on_event(event("blocks", request, taken=[], shared=[], freed=freed))
    assert (recorder.most_at_once, recorder.preemptions) == (2, 1)
    assert recorder.peak_slots == 4 * 4  # 7, 8 and 9, 3 together; before that the shared 7 counted once
    measured = metrics([(recorder, 0.0, 2.0)], [[[1, 1], [1]]], wall_seconds=3.0)
    assert measured["waste_percent"] == pytest.approx(100 * (1 - (6 + 5) / 16))
    assert measured["tokens_per_second"] == 1.5


def test_a_request_with_too_few_tokens_is_no_measurement() -> None:
    recorder = CallRecorder([Request([1], 3)], 4, "wall")
    recorder.token_times = [[0.1, 0.2]]
    with pytest.raises(ValueError, match="wrong number of tokens"):
        metrics([(recorder, 0.0, 1.0)], [[[5, 6]]], wall_seconds=1.0)


def test_cpu_time_is_a_stopwatch_for_one_thread_alone() -> None:
    assert [choose_clock("cpu", 1), choose_clock("cpu", 2), choose_clock("cuda", 1)] == ["cpu", "wall", "wall"]
