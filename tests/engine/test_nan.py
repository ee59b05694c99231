"""E3 in the engine: a prompt that computes NaN fails alone, also where others share its beginning."""

import pytest

from nanovllm import LLM, SamplingParams
from tests.engine.helpers import BOTH
from tests.engine.test_llm_errors import check_idle
from tests.weights import lively_qwen3, with_nan_token

BAD, BLOCK = 500, 4


@BOTH
@pytest.mark.parametrize("budget", [12])
def test_the_blocks_before_a_nan_are_good(
    tmp_path_factory: pytest.TempPathFactory, asynchronous: bool, budget: int
) -> None:
    """The first chunk of `spoiled` has two good blocks, then the NaN, and can be found as soon as it is computed."""
    path = with_nan_token(lively_qwen3(tmp_path_factory.getbasetemp() / "engine-checkpoints"), BAD)
    beginning = list(range(20, 28))
    spoiled, healthy = [*beginning, BAD, *range(60, 90)], [*beginning, *range(90, 95)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(
        path,
        skip_tokenizer_init=True,
        num_kv_blocks=40,
        kvcache_block_size=BLOCK,
        max_num_batched_tokens=budget,
        max_num_seqs=2,
        async_scheduling=asynchronous,
    ) as llm:
        alone = llm.generate([{"prompt_token_ids": healthy, "cache_salt": "mine"}], params, use_tqdm=False)
        for _ in range(2):
            found = llm.generate([spoiled, healthy, spoiled, healthy], params, use_tqdm=False)
            assert [output.outputs[0].finish_reason for output in found] == ["error", "length"] * 2
            for output in found[1::2]:
                assert output.outputs[0].token_ids == alone[0].outputs[0].token_ids
        check_idle(llm)
