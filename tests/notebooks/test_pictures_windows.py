"""The pictures of the chapter on sliding windows, and what is measured for them."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("matplotlib") is None:
    pytest.skip("matplotlib is not installed: make setup", allow_module_level=True)

import torch
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from stages.core import Event, SamplingParams
from stages.electives.windows import WindowEngine
from tests import oracle
from tests.weights import lively_qwen3
from tools.pictures.colours import BLUE, ORANGE
from tools.pictures.windows import (
    losses,
    mask_picture,
    memory_in_use,
    pools_map,
    save_windows,
    spread,
    spread_picture,
)

TEXT = [3, 141, 59, 26, 5, 97, 9, 31, 415, 92, 65, 35, 89, 79, 323, 84, 6, 264, 33, 83]


def test_memory_is_counted_by_the_layers_of_each_block(tmp_path: Path) -> None:
    """Two layers with a window of 5, and one that sees all. A token takes 2 x 2 x 32 x 4 bytes of a layer."""
    told: list[Event] = []
    options: dict[str, Any] = {"block_size": 4, "num_blocks": 16, "on_event": told.append, "max_num_batched_tokens": 8}
    engine = WindowEngine(str(lively_qwen3(tmp_path)), windows=(5, 0, 5), **options)
    engine.generate([TEXT[:10]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    block = 4 * 2 * 2 * 32 * 4
    # Tokens that are there after each step: 8, 10, 11, 12, 13, 14
    full, local = [3, 3, 3, 3, 4, 4], [2, 2, 2, 2, 2, 2]
    assert memory_in_use(told, engine) == [block * (a + 2 * b) for a, b in zip(full, local, strict=True)]


def test_saved_windows_are_hugging_face_s(tmp_path: Path) -> None:
    """And the loss with given windows is that of transformers with these windows."""
    path, windows = lively_qwen3(tmp_path), (4, 0, 4)
    saved = Path(save_windows(str(path), tmp_path, windows))
    logits = oracle.truth(saved).logits(TEXT)
    for first in (0, 7):
        expected = torch.nn.functional.cross_entropy(logits[first:-1].float(), torch.tensor(TEXT[first + 1 :]))
        assert abs(losses(str(path), windows, [TEXT], first) - expected.item()) < 1e-4
    assert abs(losses(str(path), (0, 0, 0), [TEXT]) - losses(str(path), windows, [TEXT])) > 0.01


def test_a_token_spreads_by_a_window_in_every_layer(tmp_path: Path) -> None:
    changes = spread(str(lively_qwen3(tmp_path)), (3, 5, 2), TEXT, changed=4, token=8)
    assert changes.shape == (4, 20)
    reached = [row.nonzero().flatten().tolist() for row in changes]
    assert reached == [list(range(4, 4 + n)) for n in (1, 3, 7, 8)]
    picture = spread_picture(changes, 4, "A token")
    shown: Any = picture.axes[0].images[0].get_array()
    assert (torch.tensor(shown.mask) == (changes == 0)).all()


def test_the_mask_is_drawn_query_by_query() -> None:
    picture = mask_picture(8, (0, 3), 2)
    for axes, count, hatched in zip(picture.axes, (36, 21), ([], [0, 2]), strict=True):
        patches = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
        seen = [p for p in patches if not p.get_hatch()]
        assert len(seen) == count
        for patch in seen:
            own = patch.get_xy()[0] == patch.get_xy()[1]
            assert to_hex(patch.get_facecolor()).upper() == (ORANGE if own else BLUE)
        # The last query, at 7, sees keys 5 to 7: blocks 0 and 1 lie before them
        assert [p.get_xy()[0] for p in patches if p.get_hatch()] == hatched
    assert picture.alt() == "Who sees what (across: key; upright: query)"


def test_every_kind_of_layers_has_a_panel(tmp_path: Path) -> None:
    told: list[Event] = []
    options: dict[str, Any] = {"block_size": 4, "num_blocks": 10, "num_window_blocks": 5, "on_event": told.append}
    engine = WindowEngine(str(lively_qwen3(tmp_path)), windows=(5, 0, 5), max_num_batched_tokens=8, **options)
    engine.generate([TEXT[:10], TEXT[10:14]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    picture = pools_map(told, engine, "AB")
    above, below = picture.axes
    assert above.get_title(loc="right") == "1 layer with no window"
    assert below.get_title(loc="right") == "2 layers with a window of 5"
    assert above.get_ylim() == pytest.approx((9.6, -0.6)) and below.get_ylim() == pytest.approx((14.6, 9.4))
    assert [text.get_text() for text in picture.legends[0].get_texts()][:2] == ["request A", "request B"]
