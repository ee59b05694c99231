"""The conformance suite with guesses: nothing that an engine promises may depend on them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine import test_conformance
from tests.engine.adapter import EngineAsStage, EngineSubject

pytestmark = pytest.mark.slow


# Events come in another order than a stage's here, too: a step may bring several tokens.
class TestNgrams(test_conformance.TestAsynchronous):
    """Guesses that are sometimes right."""

    # There are logits behind wrong guesses as well; and the chats take long.
    test_numerics_n1_logits_at_every_position = test_chats_are_hf_s = None  # type: ignore[assignment]

    @pytest.fixture
    def subject(self) -> EngineSubject:
        return EngineSubject({"speculative": {"method": "ngram", "k": 3, "n": 1}})


@dataclass(frozen=True)
class OwnDraft(EngineSubject):
    """Every model is its own draft."""

    def engine(self, path: Path, **options: Any) -> EngineAsStage:
        return super().engine(path, **options, speculative={"model": path, "k": 3})


class TestOwnDraft(test_conformance.TestAsynchronous):
    """Guesses that are always right, as long as the draft's cache holds what the target's does."""

    test_chats_are_hf_s = test_stories_are_hf_s = None  # type: ignore[assignment]  # they take long

    @pytest.fixture
    def subject(self) -> EngineSubject:
        return OwnDraft()
