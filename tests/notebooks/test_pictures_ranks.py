"""The pictures of notebook 7, and what they are drawn from."""

from importlib.util import find_spec

import pytest

if find_spec("matplotlib") is None:
    pytest.skip("matplotlib is not installed: make setup", allow_module_level=True)

from stages.checkpoint import read_config
from stages.stage_7_tensor_parallel import TensorParallelEngine
from tools.pictures.ranks import Crossing, decode_ms, held, held_by, layer_flow, listen_in, matrices, wire
from tools.pictures.three_requests import ROOT, STORY_MODEL

PNG = b"\x89PNG"
CONFIG = read_config(ROOT / "assets" / "story_model")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_parts_of_a_matrix_cover_it_once_but_for_shared_heads(ranks: int) -> None:
    for name, (rows, columns) in matrices(CONFIG).items():
        parts = [held_by(name, CONFIG, rank, ranks) for rank in range(ranks)]
        cells = sum(len(r) * len(c) for r, c in set(parts))
        assert cells == rows * columns, name
        assert len(set(parts)) == (2 if ranks == 4 and name in ("k_proj", "v_proj") else ranks)
        cut_by_inputs = name in ("o_proj", "down_proj")
        assert all(len(r) == rows for r, _ in parts) == (cut_by_inputs or ranks == 1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_layer_is_drawn_to_scale(ranks: int) -> None:
    """With copies of what several ranks hold: every rank has all that it holds, and every copy has a frame."""
    picture = held(CONFIG, ranks)
    [axes] = picture.axes
    boxes = [box.get_path().get_extents(box.get_patch_transform()) for box in axes.patches]
    areas = [box.width * box.height for box in boxes]
    frames = [rows * columns for rows, columns in matrices(CONFIG).values()]
    frames += [frames[1], frames[2]] if ranks == 4 else []
    assert len(areas) == 7 * ranks + len(frames) and sum(areas) == pytest.approx(2 * sum(frames))  # parts and frames
    labels = [text.get_text() for text in axes.texts]
    assert labels.count("copy: 1, 3") == (2 if ranks == 4 else 0)
    assert [text.get_text() for text in picture.legends[0].get_texts()] == [f"rank {rank}" for rank in range(ranks)]
    assert picture.png().startswith(PNG)


def test_a_layer_meets_twice() -> None:
    [axes] = layer_flow(CONFIG, 2).axes
    texts = [text.get_text() for text in axes.texts]
    assert texts.count("sum") == 2 and texts.count("256 numbers") == 2 and texts.count("2 of 4\nheads") == 2


def test_a_bar_for_every_collective() -> None:
    crossings = [Crossing("all_reduce", (1, 256), 1024, 0.0)] * 3 + [Crossing("all_gather", (1, 2), 16, 0.0)]
    picture = wire(crossings, title="A step")
    [axes] = picture.axes
    assert [bars[0].get_height() for bars in axes.containers] == [1024, 1024, 1024, 16]
    assert [text.get_text() for text in picture.legends[0].get_texts()] == [
        "sum over the ranks",
        "best tokens side by side",
    ]
    assert picture.png().startswith(PNG)


def test_what_is_noted_of_a_run() -> None:
    """The embedding, two sums a layer, and the best tokens; time in collectives is part of a step's time."""
    engine = TensorParallelEngine(STORY_MODEL, tensor_parallel_size=1)
    crossings = listen_in(engine)
    outside, inside = decode_ms(engine, [5, 6, 7], num_tokens=4)
    assert len(crossings) == 4 * (1 + 2 * CONFIG.num_hidden_layers + 1)
    assert [(c.kind, c.num_bytes) for c in crossings[-2:]] == [("all_reduce", 1024), ("all_gather", 16)]
    assert outside > 0 and 0 < inside < outside
