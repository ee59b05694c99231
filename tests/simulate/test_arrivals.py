"""What clients send, and when."""

import random
import statistics
import time
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from nanovllm.simulate.arrivals import VOCAB_SIZE, Lengths, Query, Replay, Texts, WorkloadOptions
from tests.simulate.linear import synthetic

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:51.4805900,12,1
"""
BURST_GPT = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,a,1.5,ChatGPT,472,18,490,Conversation log
6.5,b,1,GPT-4,30,5,35,API log
7,a,0,ChatGPT,500,0,500,Conversation log
45,a,2,ChatGPT,1087,230,1317,Conversation log
"""


def replay(path: Path, text: str, **options: Any) -> list[Query]:
    path.write_text(text)
    return list(Replay(WorkloadOptions(replay=path, **options)).queries())


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_gaps_have_the_mean_and_the_variation_that_were_asked_for(cv: float) -> None:
    times = [q.time for q in synthetic(rate=50.0, queries=12_000, cv=cv, prompt_tokens=Lengths.parse("2")).queries()]
    gaps = [b - a for a, b in pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.02, rel=0.08)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, abs=0.01 + 0.08 * cv)


@pytest.mark.parametrize(
    ("text", "mean", "low", "high"),
    [("7", 7, 7, 7), ("fixed:7", 7, 7, 7), ("uniform:10,30", 20, 10, 30), ("lognormal:100,0.5", 113.3, 1, 1e4)],
)
def test_lengths(text: str, mean: float, low: float, high: float) -> None:
    chosen, rng = Lengths.parse(text), random.Random(0)
    drawn = [chosen.draw(rng) for _ in range(4000)]
    assert min(drawn) >= low and max(drawn) <= high
    assert chosen.mean == pytest.approx(mean, rel=0.001) and statistics.fmean(drawn) == pytest.approx(mean, rel=0.03)


@pytest.mark.parametrize("text", ["", "0", "uniform:5", "uniform:9,3", "normal:1,2", "lognormal:0,1", "fixed:1,2"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="no distribution of lengths; write 512"):
        Lengths.parse(text)


def test_no_two_texts_begin_alike() -> None:
    texts = Texts()
    made = [tuple(texts.new(4)[:2]) for _ in range(2000)]
    assert len(set(made)) == 2000
    assert len(texts.new(1)) == 1 and len(texts.new(300_000)) == 300_000
    assert texts.named("a", 90) == texts.named("a", 2000)[:90] != texts.named("b", 90)
    assert all(0 <= token < VOCAB_SIZE for token in texts.named("a", 500) + texts.new(500))


def test_system_prompts_are_shared() -> None:
    queries = list(synthetic(shared_prefix=30, num_prefixes=4, prompt_tokens=Lengths.parse("10")).queries())
    assert len({tuple(q.prompt[:30]) for q in queries}) == 4 and len({tuple(q.prompt) for q in queries}) == 200
    assert {len(q.prompt) for q in queries} == {40}


def test_a_conversation_grows_turn_by_turn() -> None:
    workload = synthetic(turns=5.0, think_seconds=2.0, prompt_tokens=Lengths.parse("10"), rate=50.0, cv=0.0)
    queries = list(workload.queries())
    assert 1 + statistics.fmean(len(q.turns) for q in queries) == pytest.approx(5.0, rel=0.15)
    assert queries[-1].time == pytest.approx(len(queries) * 5.0 / 50.0), "the rate counts all turns"
    first = next(q for q in queries if len(q.turns) >= 2)
    second = workload.follow_up(first, [*first.prompt, 1, 2], now=9.0)
    assert second is not None and second.prompt[:12] == [*first.prompt, 1, 2] and len(second.prompt) == 22
    assert second.time > 9.0 and second.session == first.session and len(second.turns) == len(first.turns) - 1
    assert second.number not in {q.number for q in queries}
    assert workload.follow_up(Query(0, 0.0, [1], 1), [1, 2], now=9.0) is None


def test_arrivals_end_in_time() -> None:
    queries = list(synthetic(queries=None, seconds=3.0, rate=100.0).queries())
    assert queries[-1].time < 3.0 and len(queries) == pytest.approx(300, rel=0.2)


def test_nothing_is_made_before_it_is_wanted() -> None:
    assert len(list(islice(synthetic(queries=10**12).queries(), 3))) == 3


def test_azures_trace(tmp_path: Path) -> None:
    queries = replay(tmp_path / "t.csv", AZURE)
    assert [(len(q.prompt), q.max_tokens, q.session) for q in queries] == [
        (374, 44, None),
        (396, 109, None),
        (12, 1, None),
    ]
    assert [q.time for q in queries] == pytest.approx([0.0, 4.314579, 64.8], abs=1e-5)
    assert (
        len(replay(tmp_path / "t.csv", AZURE, seconds=10.0)) == len(replay(tmp_path / "t.csv", AZURE, queries=2)) == 2
    )
    assert replay(tmp_path / "t.csv", AZURE, speed=2.0)[-1].time == pytest.approx(32.4, abs=1e-5)
    newer = AZURE.replace("2023-11-16 18:15:46.6805900", "2024-05-10 00:00:00.009930+00:00").splitlines()[:2]
    assert len(replay(tmp_path / "t.csv", "\n".join(newer))) == 1


def test_burst_gpts_trace(tmp_path: Path) -> None:
    queries = replay(tmp_path / "t.csv", BURST_GPT)
    assert [(q.time, len(q.prompt), q.max_tokens, q.session) for q in queries] == [
        (0.0, 472, 18, "a"),
        (1.5, 30, 5, "b"),
        (40.0, 1087, 230, "a"),
    ], "who got no answer is left out"
    assert queries[2].prompt[:472] == queries[0].prompt, "a conversation has one text"
    older = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,API log\n"
    assert [q.session for q in replay(tmp_path / "t.csv", older)] == [None]


def test_a_trace_with_gaps(tmp_path: Path) -> None:
    """Empty lines and empty fields, and numbers as a spreadsheet writes them."""
    text = BURST_GPT.replace("472,18", "472.0,18.0").replace("\n45", "\n\n45") + "46,a,,ChatGPT,12,,12,API log\n\n"
    assert [(q.time, len(q.prompt)) for q in replay(tmp_path / "t.csv", text)] == [(0, 472), (1.5, 30), (40, 1087)]


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="Windows cannot change the time zone of a process")
def test_a_trace_is_the_same_in_all_time_zones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the clocks change there, as on this day in New York."""
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-03-10 01:59:59,374,44\n2024-03-10 03:00:01,396,109\n"
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        assert [q.time for q in replay(tmp_path / "t.csv", text)] == [0.0, 3602.0]
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a,b\n1,2\n", "no column contexttokens or requesttokens; known are Azure's"),
        (AZURE.replace("396", "many"), "line 3: could not convert string to float: 'many'"),
        (AZURE.replace("396", "39.6"), "line 3: '39.6' is not a number of tokens"),
        (BURST_GPT.replace("6.5", "nan"), "line 3: 'nan' is not a time"),
        (BURST_GPT.replace("45", "inf"), "line 5: 'inf' is not a time"),
        (AZURE.replace("2023-11-16 18:15:50.9951690", "soon"), "line 3: Invalid isoformat string: 'soon'"),
        (AZURE.replace("18:16:51", "18:14:51"), "line 4: earlier than the line above; sort the file"),
        ("", "no column"),
    ],
)
def test_a_trace_that_cannot_be_read(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        replay(tmp_path / "t.csv", text)
