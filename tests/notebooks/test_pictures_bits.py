"""The pictures of the chapter on FP8, and what is measured for them."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

import pytest

if find_spec("matplotlib") is None:
    pytest.skip("matplotlib is not installed: make setup", allow_module_level=True)

import torch
from safetensors.torch import load_file

from stages.checkpoint import load_model, read_config
from stages.electives.fp8 import FP8Engine, e4m3_values
from stages.stage_5_continuous_batching import ContinuousBatchingEngine
from tests import oracle
from tests.weights import lively_qwen3
from tools.pictures.eight_bits import (
    KINDS,
    activation_errors,
    judge,
    numbers_picture,
    octaves_picture,
    plant_outlier,
    read,
    save_widened,
    scales_picture,
    step_bytes,
    stored_bytes,
    through_fp8,
    through_int8,
    use_int8,
    weight_errors,
)

TEXTS = [[3, 141, 59, 26, 5, 35, 89, 79, 3, 23], [97, 9, 3, 141, 59]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(lively_qwen3(tmp_path_factory.mktemp("bits")))


def test_a_text_is_read_through_the_blocks_and_leaves_none_behind(path: str) -> None:
    engine = ContinuousBatchingEngine(path, num_blocks=2, block_size=8)
    for text in TEXTS:
        oracle.check_logits(read(engine, text), oracle.truth(Path(path)).logits(text))
        assert len(engine.pool.free_list) == 2
    with pytest.raises(ValueError, match="the pool has 2"):
        read(engine, [1] * 30)


def test_a_model_is_judged_beside_the_exact_one(path: str) -> None:
    """The loss is that of the tokens that came; an exact model has no error; an eight-bit one has some."""
    exact = ContinuousBatchingEngine(path, num_blocks=8)
    found = judge(exact, {"exact": exact, "e4m3": FP8Engine(path, num_blocks=8)}, TEXTS)
    losses = [
        -oracle.truth(Path(path)).logits(text)[:-1].log_softmax(-1)[range(len(text) - 1), text[1:]] for text in TEXTS
    ]
    assert found["exact"].loss == pytest.approx(torch.cat(losses).mean().item(), rel=1e-4)
    assert found["exact"].error == 0 and found["exact"].same == 1
    logits = [(read(exact, text), read(FP8Engine(path, num_blocks=8), text)) for text in TEXTS]
    error = torch.cat([(a - b).square().mean(-1) for a, b in logits]).mean()
    spread = torch.cat([a.var(-1) for a, _ in logits]).mean()
    assert found["e4m3"].error == pytest.approx((error / spread).sqrt().item(), rel=1e-4)
    same = torch.cat([a.argmax(-1) == b.argmax(-1) for a, b in logits]).float().mean().item()
    assert found["e4m3"].same == pytest.approx(same) and 0.01 < found["e4m3"].error < 0.5


def test_int8_has_steps_of_one_size_in_each_block() -> None:
    weight = torch.tensor([[127.0, 0.4, -3.6], [1.27, 0.004, -0.036]])
    assert through_int8(weight, (2, 3)).tolist() == [[127, 0, -4], [1, 0, 0]]
    torch.testing.assert_close(through_int8(weight, (1, 3))[1], torch.tensor([1.27, 0, -0.04]))


def test_errors_are_shares_of_what_is_rounded(path: str) -> None:
    model = load_model(path).model
    errors = weight_errors(model)
    assert list(errors) == ["none", *KINDS] and errors["none"][1] != errors["none"][1]
    weights = [p for p in model.layers.parameters() if p.dim() == 2]
    lost = sum((through_fp8(w, (1, w.shape[1])) - w).square().sum() for w in weights)
    size = sum(w.square().sum() for w in weights)
    assert errors["channel"][0] == pytest.approx(float((lost / size) ** 0.5), rel=1e-4)
    assert errors["channel"][1] < errors["block"][1] < errors["tensor"][1], "int8 gains by scales that few share"


def test_activations_are_heard_once_and_the_engine_stays_as_it_was(path: str) -> None:
    engine = ContinuousBatchingEngine(path, num_blocks=8)
    found = activation_errors(engine, TEXTS)
    assert list(found) == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    for largest, e4m3, int8 in found.values():
        assert 1 < largest < 160**0.5 and 0.01 < e4m3 < 0.05 and int8 < 0.1
    assert found["q_proj"] == found["k_proj"], "both see the same"
    assert not any(module._forward_pre_hooks for module in engine.model.modules())


def test_rounded_models_are_saved_and_used(path: str, tmp_path: Path) -> None:
    """What is saved has the engine's own logits; int8 has others."""
    engine = FP8Engine(path, num_blocks=8)
    saved = save_widened(engine, path, tmp_path / "saved")
    oracle.check_logits(read(ContinuousBatchingEngine(saved, num_blocks=8), TEXTS[0]), read(engine, TEXTS[0]))
    ints = use_int8(ContinuousBatchingEngine(path, num_blocks=8), "channel")
    weight = load_file(f"{path}/model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    torch.testing.assert_close(ints.model.layers[1].mlp.up_proj.weight.data, through_int8(weight, (1, 96)))


@pytest.mark.parametrize("where", ["row", "column"])
def test_an_outlier_changes_the_weights_and_not_the_model(
    path: str, tmp_path: Path, where: Literal["row", "column"]
) -> None:
    planted = plant_outlier(path, tmp_path, 2.0**10, where)
    before, after = (ContinuousBatchingEngine(p, num_blocks=8) for p in (path, planted))
    assert torch.equal(read(before, TEXTS[0]), read(after, TEXTS[0]))
    part, name = ("mlp", "up_proj") if where == "row" else ("self_attn", "k_proj")
    old, new = (getattr(getattr(e.model.layers[2], part), name).weight for e in (before, after))
    changed = (old != new).nonzero()
    assert len(changed) == (old.shape[1] if where == "row" else old.shape[0])
    assert not changed[:, 0 if where == "row" else 1].any() and torch.equal(new[0, 0], old[0, 0] * 1024)


def test_bytes_that_a_step_reads(path: str) -> None:
    """Linear layers, the head and the cache. What is stored of a model is what is read, norms and scales too."""
    config = read_config(Path(path))
    full, small = (
        engine(path, dtype=torch.bfloat16, num_blocks=1).model for engine in (ContinuousBatchingEngine, FP8Engine)
    )
    norms = 2 * (3 * (2 * 96 + 2 * 32) + 96)
    assert stored_bytes(full) == step_bytes(config, 0, 0) + norms
    scales = 4 * sum(scale.numel() for name, scale in small.named_buffers() if name.endswith("weight_scale"))
    assert stored_bytes(small) == step_bytes(config, 0, 0, weight=1) + norms + scales
    cached = step_bytes(config, 5, 100, kv=1) - step_bytes(config, 0, 0)
    assert cached == 5 * 100 * 3 * 2 * 2 * 32


# --- the pictures -----------------------------------------------------------------------------------------------------


def test_every_number_has_a_line_and_weights_lie_below() -> None:
    picture = numbers_picture(torch.tensor([[-448.0, 0.5, 1.0]]), "Numbers")
    assert picture.alt() == "Numbers (across: value; upright: weights)"
    line, below = cast(Any, picture.axes)
    [drawn] = line.collections
    places = {float(segment[0][0]) for segment in drawn.get_segments()}
    assert places == set(e4m3_values().nan_to_num(0).tolist())
    assert sum(bar.get_height() for bar in below.patches) == 3
    assert len(picture.legends[0].get_texts()) == 2


def test_octaves_are_counted_and_no_value_is_left_out() -> None:
    picture = octaves_picture({"some": torch.tensor([1.0, 1.5, -3.0, 0.0])}, "Octaves")
    numbers, some = cast(Any, picture.axes)
    counts = [bar.get_height() for bar in numbers.patches]
    assert sum(counts) == 126 and counts[16] == 8, "eight numbers from 1 to 2"
    shares = {round(bar.get_x() + bar.get_width() / 2, 1): bar.get_height() for bar in some.patches if bar.get_height()}
    assert shares == {-15.5: 25, 0.5: 50, 1.5: 25}, "zero is shown with the smallest"
    assert "smallest" in picture.legends[0].get_texts()[0].get_text()
    assert picture.alt().startswith("Octaves (across: magnitude")


def test_scales_are_drawn_where_they_belong() -> None:
    weight = torch.ones(256, 200)
    weight[:128, 128:] = 3
    picture = scales_picture(weight, KINDS, "Scales")
    panels: list[Any] = [axes for axes in picture.axes if axes.get_images()]
    assert [panel.get_title() for panel in panels] == ["tensor: 1 scale", "channel: 256 scales", "block: 4 scales"]
    shown = [torch.tensor(panel.get_images()[0].get_array()) * 448 for panel in panels]
    assert shown[0].unique().tolist() == pytest.approx([3])
    torch.testing.assert_close(shown[1][:, 0], weight.amax(1))
    torch.testing.assert_close(shown[2], weight)
    assert picture.alt() == "Scales"
