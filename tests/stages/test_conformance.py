"""The suite of conformance.py over the stages."""

from pathlib import Path

import pytest

from stages.core import SamplingParams
from stages.stage_1_naive import NaiveEngine
from tests.stages.conformance import Conformance, run
from tests.stages.requests import PROMPTS, TIGHT, greedy, story_prompts
from tests.stages.subject import Subject, since
from tests.weights import lively_qwen3


class TestConformance(Conformance):
    @since(2)
    def test_seeded_tokens_are_those_of_stage_1(self, subject: Subject, checkpoints: Path) -> None:
        params = [SamplingParams(t, 10, seed=7 * i) for i, t in enumerate((1.0, 0.8, 1.2, 0.0, 2.0, 1.0))]
        expected = NaiveEngine(str(lively_qwen3(checkpoints))).generate(PROMPTS, params)
        assert subject.engine(lively_qwen3(checkpoints), **TIGHT).generate(PROMPTS, params) == expected

    @pytest.mark.slow
    @since(1, 1)
    def test_all_stories_even_without_a_cache(self, subject: Subject, story_model: Path) -> None:
        run(subject, story_model, story_prompts(story_model), greedy(64, ignore_eos=True))
