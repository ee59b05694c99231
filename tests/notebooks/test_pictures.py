"""The pictures: drawn for every stage, the same bytes for the same events, and what they say is readable from them."""

import io
import re
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("matplotlib") is None:
    pytest.skip("matplotlib is not installed: make setup", allow_module_level=True)

from PIL import Image

from stages.manifest import load_stage
from tests.contrast import contrast
from tools.pictures.blocks import (
    block_map,
    cache_growth,
    holdings,
    lanes_and_blocks,
    pool_slots,
    prefix_tree,
    waste,
)
from tools.pictures.colours import NIGHT, at_night, night_of, rgb
from tools.pictures.plots import lines, time_per_token
from tools.pictures.steps import swimlane, swimlanes, work_map
from tools.pictures.three_requests import (
    BLOCK_SIZE,
    NAMES,
    NUM_BLOCKS,
    SEATS,
    Run,
    compare,
    list_exercises,
    load_tokenizer,
    record,
    three_requests,
)
from tools.pictures.timeline import slot_use

OPTIONS: dict[str, Any] = {
    "max_num_seqs": SEATS,
    "block_size": BLOCK_SIZE,
    "num_blocks": NUM_BLOCKS,
    "max_num_batched_tokens": 64,
}
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def runs() -> dict[int, Run]:
    stages = [load_stage(number) for number in (1, 2, 4, 5)]
    return {s.number: record(s.engine_class(), **{k: v for k, v in OPTIONS.items() if k in s.options}) for s in stages}


def texts(picture: Any) -> list[str]:
    [axes] = picture.axes
    return [text.get_text() for text in axes.texts]


def legend(picture: Any) -> list[str]:
    return [text.get_text() for text in picture.legends[0].get_texts()]


def test_every_stage_gives_the_same_tokens_and_a_picture(runs: dict[int, Run]) -> None:
    assert all(run.outputs == runs[1].outputs for run in runs.values())
    for run in runs.values():
        picture = swimlane(run.events, names=NAMES)
        assert picture.png().startswith(PNG)
        assert [tick.get_text() for tick in picture.axes[0].get_yticklabels()] == list(NAMES)


def test_the_same_events_give_the_same_bytes(runs: dict[int, Run]) -> None:
    first, second = (swimlane(runs[5].events, names=NAMES, by="tokens").png() for _ in range(2))
    assert first == second


def test_a_notebook_gets_a_sharp_picture_with_its_width_and_words_for_who_does_not_see_it(runs: dict[int, Run]) -> None:
    png, about = swimlane(runs[5].events, names=NAMES)._repr_png_()
    width = int.from_bytes(png[16:20], "big")  # of the PNG header
    assert png.startswith(PNG) and about["width"] < width < 2 * about["width"]
    assert about["alt"] == "Who runs when (across: step; upright: request)"


def test_labels_at_the_right_end_stay_inside(runs: dict[int, Run]) -> None:
    last = [event for event in runs[4].events if event["type"] == "admitted"][-1]
    late = [event | {"cached": 4} if event is last else event for event in runs[4].events]
    picture: Any = swimlane(late, until=26, names=NAMES)
    [label] = [text for text in picture.axes[0].texts if text.get_text() == "+4 from the cache"]
    assert label.get_ha() == "right"


def test_the_legend_names_what_is_there_and_nothing_else(runs: dict[int, Run]) -> None:
    assert "computed again" in legend(swimlane(runs[1].events))
    assert "computed again" not in legend(swimlane(runs[2].events))
    assert "shared by several" in legend(block_map(runs[4].events, NUM_BLOCKS, names=NAMES))
    assert "shared by several" not in legend(block_map(runs[5].events, NUM_BLOCKS, names=NAMES))
    plenty = runs[5].events
    tight = [*plenty, plenty[-1] | {"type": "preempted"}]
    assert "preempted" in legend(swimlane(tight)) and "preempted" not in legend(swimlane(plenty))


def test_hits_are_written_at_the_box(runs: dict[int, Run]) -> None:
    assert "+48 from the cache" in texts(swimlane(runs[4].events, names=NAMES))
    assert "54" in texts(swimlane(runs[4].events, names=NAMES))


def test_the_other_pictures_have_units_on_their_axes(runs: dict[int, Run]) -> None:
    tokenizer, (prompts, _) = load_tokenizer(), three_requests()
    pictures = [
        work_map(runs[4].events, request=1),
        cache_growth(runs[2].events, names=NAMES, reserved=200),
        time_per_token({"stage 1": runs[1].events, "stage 2": runs[2].events}),
        lines({"a": ([1, 2], [3, 4])}, xlabel="size [tokens]", ylabel="time [ms]", title="a line"),
        waste({"stage 5": slot_use(runs[5].events, block_size=BLOCK_SIZE)}),
    ]
    for picture in pictures:
        assert picture.png().startswith(PNG)
        assert picture.axes[0].get_xlabel()
    assert all("[" in picture.axes[0].get_ylabel() for picture in pictures[1:4])
    tree = prefix_tree(prompts, BLOCK_SIZE, tokenizer.decode, names=NAMES)
    assert texts(tree).count("A, B: 16 tokens") == 3
    assert {"A: 6 tokens", "B: 5 tokens", "C: 6 tokens"} <= set(texts(tree))


def test_a_guess_is_judged_by_its_factor(capsys: pytest.CaptureFixture[str]) -> None:
    compare(None, 14.08, "times as many")
    compare(10, 40, "ms")
    compare(80, 40, "ms")
    out = capsys.readouterr().out
    assert "none yet" in out and "too low by 4 x" in out and "too high by 2 x" in out


def test_exercises_are_listed_from_the_stage_itself(capsys: pytest.CaptureFixture[str]) -> None:
    list_exercises(2)
    assert re.findall(r"^ *(2\.\d)", capsys.readouterr().out, re.MULTILINE) == ["2.1", "2.2", "2.3", "2.4"]


def test_record_wants_prompts_with_their_parameters() -> None:
    with pytest.raises(ValueError, match="prompts and params"):
        record(load_stage(1).engine_class(), [[1, 2]])


def test_lanes_and_blocks_share_their_steps(runs: dict[int, Run]) -> None:
    picture = lanes_and_blocks(runs[5].events, NUM_BLOCKS, title="Stage 5")
    lanes, blocks = picture.axes
    assert lanes.get_xlim() == blocks.get_xlim() and blocks.get_xlabel() == "step"
    labels: list[Any] = lanes.get_yticklabels()
    frames = [label.get_bbox_patch().get_edgecolor() for label in labels]
    assert len(set(frames)) == 3  # of A, B and C, and those of their blocks
    faces = {bar.get_facecolor() for container in blocks.containers for bar in container}
    assert faces == set(frames)


def test_runs_on_one_axis(runs: dict[int, Run]) -> None:
    picture = swimlanes({"stage 4": runs[4].events, "stage 5": runs[5].events}, "Two runs")
    first, second = picture.axes
    assert [axes.get_title(loc="left") for axes in picture.axes] == ["stage 4", "stage 5"]
    work = [sum(e["tokens"] for e in runs[n].events if e["type"] == "scheduled") for n in (4, 5)]
    assert first.get_xlim() == second.get_xlim() == (0, pytest.approx(max(work) * 1.01))
    assert "finished" in legend(picture)


@pytest.mark.parametrize("num_blocks", [NUM_BLOCKS, 32])
def test_every_slot_of_the_pool_is_in_its_block(num_blocks: int, runs: dict[int, Run]) -> None:
    """A large pool stands in two columns."""
    [axes] = pool_slots(runs[5].events, num_blocks, BLOCK_SIZE, step=4, names=NAMES).axes
    boxes: list[Any] = list(axes.patches)
    whole, slots = ([box for box in boxes if box.get_width() == width] for width in (BLOCK_SIZE, 1))
    assert len(whole) == num_blocks and len({box.get_x() for box in whole}) == (1 if num_blocks == NUM_BLOCKS else 2)
    places = {(box.get_x() + offset, box.get_y()) for box in whole for offset in range(BLOCK_SIZE)}
    drawn = [(box.get_x(), box.get_y()) for box in slots]
    tables = [holding.table for holding in holdings(runs[5].events, step=4)]
    assert set(drawn) <= places and len(set(drawn)) == len(drawn) == BLOCK_SIZE * len({b for t in tables for b in t})
    numbers = [text.get_text() for text in axes.texts]
    assert [n for n in numbers if n.isdigit()][:num_blocks] == [str(block) for block in range(num_blocks)]


def test_by_night_paper_and_ink_change_places(runs: dict[int, Run]) -> None:
    day = swimlane(runs[5].events, names=NAMES).png()
    night = at_night(day)
    assert len(night) == len(day) and at_night(day) == night
    pictures = [Image.open(io.BytesIO(png)).convert("RGB") for png in (day, night)]
    shown = dict(zip(*(zip(*[iter(picture.tobytes())] * 3, strict=True) for picture in pictures), strict=True))
    assert shown[255, 255, 255] == rgb(NIGHT["#FFFFFF"]) and shown[0, 0, 0] == rgb(NIGHT["#000000"])
    assert shown[0, 114, 178] == pytest.approx(rgb(NIGHT["#0072B2"]), abs=2)
    grey = night_of((64.0, 64.0, 64.0))  # three quarters of the way to ink
    assert grey == pytest.approx([20 + 0.75 * 213, 24 + 0.75 * 206, 31 + 0.75 * 192], abs=3)
    with pytest.raises(ValueError, match="has no palette"):
        at_night(day.replace(b"PLTE", b"PLTX"))


def test_by_night_colours_can_be_told_from_paper() -> None:
    paper = rgb(NIGHT["#FFFFFF"])
    assert all(contrast(rgb(night), paper) >= 2.5 for day, night in NIGHT.items() if day not in ("#FFFFFF", "#FFF3D6"))
    assert contrast(rgb(NIGHT["#000000"]), paper) > 10
