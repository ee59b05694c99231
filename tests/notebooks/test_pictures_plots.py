"""The pictures of notebook 6."""

from importlib.util import find_spec

import pytest

if find_spec("matplotlib") is None:
    pytest.skip("matplotlib is not installed: make setup", allow_module_level=True)

from stages.stage_6_cuda_graphs import bucket_ladder
from tools.pictures.decode_profile import Operation
from tools.pictures.plots import buckets, timeline

PNG = b"\x89PNG"
STEP: list[Operation] = [
    ("cpu", "aten::mul", 100, 50),
    ("launch", "cudaLaunchKernel", 110, 20),
    ("gpu", "kernel", 140, 10),
    ("launch", "cudaStreamSynchronize", 200, 4000),
]


def test_padding_fills_every_batch_up_to_its_bucket() -> None:
    picture = buckets(bucket_ladder(12))
    [axes] = picture.axes
    wanted, padding = axes.containers
    assert [bar.get_height() for bar in wanted] == list(range(1, 13))
    tops = [bar.get_y() + bar.get_height() for bar in padding]
    assert tops == [1, 2, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12]
    assert picture.png().startswith(PNG)


def test_a_timeline_has_a_panel_a_run_and_a_row_a_track() -> None:
    picture = timeline({"before": STEP, "after": STEP[2:]}, title="A step")
    assert [axes.get_title(loc="left") for axes in picture.axes] == ["before", "after"]
    assert [label.get_text() for label in picture.axes[0].get_yticklabels()] == ["CPU", "launch", "GPU"]
    assert picture.axes[1].get_xlim() == (0, 4.2) and "[ms]" in picture.axes[1].get_xlabel()
    assert [text.get_text() for text in picture.legends[0].get_texts()][-1] == "waiting"
    assert picture.png().startswith(PNG)


def test_a_piece_of_a_timeline_is_in_microseconds() -> None:
    picture = timeline({"one": STEP[:1]}, title="A piece", first_us=50, last_us=150)
    [axes] = picture.axes
    assert axes.get_xlim() == (50, 150) and "[µs]" in axes.get_xlabel()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["CPU"]
    assert [text.get_text() for text in picture.legends[0].get_texts()] == ["operations of torch"]
