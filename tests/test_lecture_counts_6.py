"""Counts that the lecture on stage 6 shows or speaks, and that no directive fetches, follow from what they count."""

import inspect
import re

from stages.checkpoint import read_config
from stages.stage_6_cuda_graphs import bucket_ladder
from tests.in_words import in_words
from tests.test_lecture_counts import NO_COUNTS, text_of
from tools import ROOT
from tools.exercises.exercises import find_holes
from tools.lectures import pulls
from tools.pictures.decode_profile import RECORDINGS, SHAPE, SHAPES, busy_us, launch_ms, read
from tools.pictures.three_requests import NUM_BLOCKS

H100_BYTES_PER_SECOND = 3.35e12
NAMES = rf"{NO_COUNTS}|[AH]\d00|\b(?:bf|fp)\d\d\b|```.*?```"


def numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", pulls.result(name)["workload"])]


def phrases() -> list[str]:
    holes = find_holes((ROOT / "stages" / "stage_6_cuda_graphs.py").read_text(encoding="utf-8"))
    lines = [in_words(hole.num_code_lines) for hole in holes]
    columns = re.search(r"hidden_size=(\d+)", inspect.getsource(launch_ms))
    assert columns is not None
    config = read_config(SHAPES / SHAPE)
    layer = config.hidden_size * (
        config.head_dim * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
        + 3 * config.intermediate_size
    )
    weights = 2 * (config.num_hidden_layers * layer + config.vocab_size * config.hidden_size)  # bytes
    assert 0.3e-3 < weights / H100_BYTES_PER_SECOND < 0.5e-3
    assert bucket_ladder(9) == [1, 2, 4, 8, 9]
    times = {n: pulls.figure("stage_6.h200", f"decode_{n}")["values"] for n in (1, 64)}
    assert times[64]["stage 6"]["median"] < 1.5 * times[1]["stage 6"]["median"]
    launched = [times[1][name] for name in ("stage 5", "stage 5 with the kernel")]
    no_faster = launched[1]["median"] - launched[0]["median"]
    assert 0 < no_faster < min(time["max"] - time["min"] for time in launched)
    recording = read(RECORDINGS / "decode_profile.h200.json.gz")["stages"]
    assert 3 < recording["stage 6 compiled"]["seconds_to_build"] - recording["stage 6"]["seconds_to_build"] < 15
    kernels = [sum(track == "gpu" for track, *_ in recording[name]["events"]) for name in ("stage 5", "stage 6")]
    assert 0.7 < kernels[1] / kernels[0] < 0.8 and kernels[0] > 2000
    step = recording["stage 5"]["events"]
    assert 0.08 < busy_us(step, "gpu") / 1000 / recording["stage 5"]["step_ms"] < 0.12
    attention = [(start, start + us) for _, name, start, us in step if name == "aten::scaled_dot_product_attention"]
    starts = [start for track, name, start, _ in step if track == "launch" and "LaunchKernel" in name]
    [launches] = {sum(begin <= start < end for start in starts) for begin, end in attention}
    whole = max(start + us for _, _, start, us in step)
    assert 0.18 < sum(end - begin for begin, end in attention) / whole < 0.22
    return [
        f"{SHAPE} with all its {config.num_hidden_layers} layers, but with matrices of **{columns[1]} columns**",
        f"the best of {in_words(inspect.signature(launch_ms).parameters['repeats'].default)} tries",
        "all weights of the real model in less than half a millisecond",
        f"Who says {', '.join(str(10 * x) for x in (7, 8, 9))} for the second",
        f"The file has {in_words(len(holes))} holes",
        f"what is the ladder for {in_words(9)} seats? One, two, four, eight, and nine",
        f"A batch of {in_words(33)} computes {in_words(64 - 33)} rows of nothing",
        f"for {in_words(33)} rows or for {in_words(bucket_ladder(256)[7])}",
        f"that lives in block {NUM_BLOCKS}",
        f"are filled up with {NUM_BLOCKS}",
        f"{lines[1].capitalize()} lines in Rows.fill",
        f"{lines[2].capitalize()} lines at the end of decode_step",
        f"on an H200 with {numbers('idle.h200')[0]} sequences",
        f"And with {numbers('stage_6.h200')[2]} sequences: **more, or less**",
        f"step for {in_words(numbers('stage_6.h200')[2])} costs less than one and a half times a step for one",
        "for nine tenths of the step the GPU does nothing at all",
        f"behind it {in_words(launches)} launches, one kernel after the other",
        "Over all layers that is a fifth of the step",
        "Thousands of launches have become one. Three kernels in four are still there",
        "It takes some seconds more each time an engine is built",
    ]


def test_counts_follow_from_what_they_count() -> None:
    text = text_of(6)
    for phrase in phrases():
        assert phrase in text, f"lectures/stage_6.md does not say {phrase!r}, which is what follows now"
        text = text.replace(phrase, "…")
    typed = [text[max(0, m.start() - 40) : m.end() + 20] for m in re.finditer(r"\d{2,}", re.sub(NAMES, "", text))]
    assert not typed, "fetch them with a directive, or hold them here"


def test_the_page_of_results_says_no_more_of_the_gain_than_was_measured() -> None:
    times = {name: value["median"] for name, value in pulls.figure("stage_6.h200", "decode_1")["values"].items()}
    assert f"at batch 1 makes it more than {in_words(int(times['stage 5'] / times['stage 6']))} times as fast" in (
        pulls.read("docs/results.md").replace("\n", " ")
    )
