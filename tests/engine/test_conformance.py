"""The stages' conformance suite over the engine: synchronous, asynchronous, and with parts of it switched off."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.engine.adapter import EngineSubject
from tests.stages.conformance import Conformance, run
from tests.stages.requests import PROMPTS, TIGHT, greedy
from tests.weights import lively_qwen3


class EngineConformance(Conformance):
    @pytest.fixture
    def checkpoints(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.getbasetemp() / "engine-checkpoints"

    @pytest.fixture
    def story_model(self) -> Path:
        return Path(__file__).parents[2] / "assets" / "story_model"

    # What the engine does differently from a stage, and its own tests cover

    def test_scheduler_s6_degenerate_requests(self, subject: Any, checkpoints: Path) -> None:
        """All are refused before anything starts; a length beyond the model's is not an error but the end."""
        events: list[Any] = []
        path = lively_qwen3(checkpoints)
        engine = subject.engine(path, **TIGHT, on_event=events.append)
        assert engine.generate([], greedy(4)) == [] == engine.generate([], [])
        for prompts, params, message in (
            ([[1], []], greedy(4), r"prompts\[1\].* empty"),
            ([[2, 512]], greedy(4), r"prompts\[0\].*512"),
            ([[-1]], greedy(4), r"prompts\[0\].*-1"),
            ([[1], [2]], [greedy(4)], "sampling_params has 1 .* 2 prompts"),
            ([[5] * 4096], greedy(1), "max_model_len=4096"),
            ([[5] * 400], greedy(1), "pool"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.generate(prompts, params)
            subject.check_idle(engine)
        assert not [event for event in events if event["type"] not in ("added", "finished")]
        assert len(engine.generate([[1, 511]], greedy(4, ignore_eos=True))[0]) == 4

    def test_unknown_arguments_are_type_errors(self, subject: Any, checkpoints: Path) -> None:
        with pytest.raises(TypeError, match="max_sequences"):
            subject.engine(lively_qwen3(checkpoints), max_sequences=3)

    def test_sizes_below_one_are_refused(self, subject: Any, checkpoints: Path) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "kvcache_block_size", "num_kv_blocks"):
            for value in (0, -1):
                with pytest.raises(ValueError, match=f"{name}.*{value}"):
                    subject.engine(lively_qwen3(checkpoints), **{name: value})


class TestSynchronous(EngineConformance):
    @pytest.fixture
    def subject(self) -> EngineSubject:
        return EngineSubject({"async_scheduling": False})


class TestAsynchronous(EngineConformance):
    """Here a token is told one step after it was sampled, so events come in another order than a stage's."""

    @pytest.fixture
    def subject(self) -> EngineSubject:
        return EngineSubject({"async_scheduling": True})

    def test_a_pool_far_too_small(self, subject: Any, checkpoints: Path) -> None:
        events: list[Any] = []
        options = TIGHT | {"num_blocks": 10, "max_num_seqs": 6, "on_event": events.append}
        run(subject, lively_qwen3(checkpoints), PROMPTS, greedy(16, ignore_eos=True), **options)
        assert any(event["type"] == "preempted" for event in events)

    def test_events_tell_what_happened(self, subject: Any, checkpoints: Path) -> None:
        """Each request is added, admitted, told its tokens in order, and finished, once; blocks balance."""
        events: list[Any] = []
        engine = subject.engine(lively_qwen3(checkpoints), **TIGHT, on_event=events.append)
        outputs = engine.generate(PROMPTS, [greedy(n) for n in (1, 9, 4, 12, 2, 7)])
        for request, output in enumerate(outputs):
            mine = [event for event in events if event["request"] == request]
            assert [token for e in mine if e["type"] == "token" for token in e["ids"]] == output
            assert mine[0]["type"] == "added" and [e["type"] for e in mine].count("finished") == 1
            blocks = [e for e in mine if e["type"] == "blocks"]
            taken = sum(len(e["taken"]) + len(e["shared"]) for e in blocks)
            assert taken == sum(len(e["freed"]) for e in blocks) > 0  # nothing is shared in this test


def combinations() -> Iterator[Any]:
    """All of block size, caching, chunked, overlapped, tight. The fast tier has each setting of the switches once."""
    for block_size, *switches in product((1, 3, 16), *[(False, True)] * 4):
        fast = block_size == (3 if sum(switches) % 2 else 16)
        yield pytest.param(block_size, *switches, marks=() if fast else pytest.mark.slow)


@pytest.mark.parametrize(("block_size", "caching", "chunked", "overlapped", "tight"), [*combinations()])
def test_every_combination(
    tmp_path_factory: pytest.TempPathFactory,
    block_size: int,
    caching: bool,
    chunked: bool,
    overlapped: bool,
    tight: bool,
) -> None:
    """Block size x prefix cache x chunking x async x a pool far too small: Hugging Face's tokens, twice in a row."""
    path = lively_qwen3(tmp_path_factory.getbasetemp() / "engine-checkpoints")
    subject = EngineSubject(
        {"enable_prefix_caching": caching, "enable_chunked_prefill": chunked, "async_scheduling": overlapped}
    )
    options = {
        "block_size": block_size,
        "num_blocks": -(-(40 if tight else 400) // block_size),
        "max_num_seqs": 4,
        "max_num_batched_tokens": 24 if not chunked else 7,
    }
    prompts = [*PROMPTS, PROMPTS[5][:12] + PROMPTS[4]]
    if not chunked:
        prompts = [p for p in prompts if len(p) <= 24]
    run(subject, path, prompts, greedy(16, ignore_eos=True), **options)  # type: ignore[arg-type]
