"""The pictures of the chapter on mixtures of experts, and what is counted for them."""

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("matplotlib") is None:
    pytest.skip("matplotlib is not installed: make setup", allow_module_level=True)

import torch
from matplotlib.colors import to_hex
from matplotlib.patches import FancyBboxPatch, Rectangle

from stages.core import SamplingParams
from stages.electives.mixture_of_experts import MixtureOfExpertsEngine
from tests.weights import lively_qwen3_moe
from tools.pictures.experts import (
    EXPERT_COLOURS,
    experts_read,
    favourites,
    hear_routers,
    hear_texts,
    router_picture,
    speakers,
)

TEXTS = [[3, 141, 59, 26, 5], [97, 9]]


def test_routers_are_heard_step_by_step_and_layer_by_layer(tmp_path: Path) -> None:
    """Layers 1 and 3 have experts. Five tokens and two, then two sequences of one token each."""
    path = str(lively_qwen3_moe(tmp_path, num_hidden_layers=4, decoder_sparse_step=2))
    engine = MixtureOfExpertsEngine(path)
    steps = hear_routers(engine)
    engine.generate(TEXTS, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert [{layer: tuple(said.shape) for layer, said in step.items()} for step in steps] == [
        {1: (tokens, 8), 3: (tokens, 8)} for tokens in (7, 2, 2)
    ]
    alone = hear_texts(MixtureOfExpertsEngine(path), TEXTS)
    for layer, said in alone.items():
        torch.testing.assert_close(said, steps[0][layer], atol=1e-4, rtol=1e-4)


def test_an_expert_of_several_tokens_is_read_once() -> None:
    """In layer 0 two tokens agree, in layer 4 they do not."""
    agree = torch.tensor([[0.0, 3, 2, 1], [1.0, 2, 3, 0]])
    step = {0: agree, 4: torch.tensor([[3.0, 2, 1, 0], [0.0, 1, 2, 3]])}
    assert experts_read([step, {0: agree[:1]}], 2) == [(2, 3.0), (1, 2.0)]


def test_favourites_are_what_an_expert_has_beyond_its_share() -> None:
    words = ["the"] * 8 + ["fox"] * 2 + ["owl"] * 2
    experts = [0, 1] * 4 + [0, 0] + [1, 0]
    assert favourites(words, experts, 3) == [["fox"], ["the", "owl"], []]


def test_the_chosen_are_framed_and_every_word_is_named() -> None:
    probabilities = torch.tensor([[0.1, 0.6, 0.3], [0.7, 0.2, 0.1]])
    picture = router_picture(["Once", " upon"], probabilities, 2, "A router")
    assert picture.alt() == "A router (across: token; upright: expert)"
    axes = picture.axes[0]
    frames = [patch.get_xy() for patch in axes.patches if isinstance(patch, Rectangle)]
    assert sorted((round(x), round(y)) for x, y in frames) == [(0, 1), (0, 2), (1, 0), (1, 1)]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["Once", "upon"]


def test_every_word_has_the_colour_and_the_number_of_its_expert() -> None:
    words = ["Once", " upon", " a", " time", ",", "\n"] * 12
    experts = [0, 2, 2, 1, 0, 1] * 12
    picture = speakers(words, experts, "A text")
    [axes] = picture.axes
    shown = [text.get_text() for text in axes.texts]
    assert shown[::2] == [word.strip() or "¶" for word in words] and shown[1::2] == [str(e) for e in experts]
    boxes = [patch for patch in axes.patches if isinstance(patch, FancyBboxPatch)]
    assert [to_hex(box.get_facecolor()).upper() for box in boxes] == [EXPERT_COLOURS[e] for e in experts]
    right = max(box.get_x() + box.get_width() for box in boxes)
    assert right <= axes.get_xlim()[1], "the text stays inside"
    assert len({round(text.get_position()[1], 1) for text in axes.texts[::2]}) > 2, "a long text has several lines"
    assert [text.get_text() for text in picture.legends[0].get_texts()] == ["expert 0", "expert 1", "expert 2"]
