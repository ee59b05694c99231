"""The engine's suites over models of another kind, and two ranks for them."""

import pytest

from tests.engine import test_conformance
from tests.engine.ranks import Starter

# Each setting of the switches once, as in the fast tier of the suites' own models
COMBINATIONS = [parameters.values for parameters in test_conformance.combinations() if not parameters.marks]


class OtherModels(test_conformance.EngineConformance):
    """A subclass has a fixture `models`, which puts its models in the place of those of the suites."""

    test_chats_are_hf_s = None  # type: ignore[assignment]  # there is no such model of another kind

    @pytest.mark.slow
    @pytest.mark.parametrize(("block_size", "caching", "chunked", "overlapped", "tight"), COMBINATIONS)
    def test_every_combination(
        self,
        models: None,
        tmp_path_factory: pytest.TempPathFactory,
        block_size: int,
        caching: bool,
        chunked: bool,
        overlapped: bool,
        tight: bool,
    ) -> None:
        test_conformance.test_every_combination(tmp_path_factory, block_size, caching, chunked, overlapped, tight)


@pytest.fixture(params=[pytest.param("cpu", id="2-gloo"), pytest.param("cuda", id="2-nccl", marks=pytest.mark.gpu(2))])
def start(request: pytest.FixtureRequest) -> Starter:
    return Starter(2, request.param)  # test_sharding.py has four ranks, as threads
