"""E4: integers of other libraries, and what the tokenizers of `transformers` return, are token ids."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.llm import as_list
from tests.weights import lively_qwen3

A, B = [3, 1, 4, 1, 5], [2, 7, 1, 8]
PADDED = BatchEncoding({"input_ids": [A, [0, *B]], "attention_mask": [[1] * 5, [0, 1, 1, 1, 1]]})

ONE: dict[str, Any] = {
    "a list": A,
    "a range": range(3, 8),
    "numpy's integers": [np.int64(token) for token in A],
    "small ones": [np.int32(A[0]), *map(np.uint16, A[1:])],
    "arrays without a dimension": [np.array(token) for token in A],
    "torch's numbers": list(torch.tensor(A)),
    "an array": np.array(A, dtype=np.int32),
    "a tensor": torch.tensor(A),
    "a row of a tensor": torch.tensor([A]),
    "an array in a dict": {"prompt_token_ids": np.array(A)},
    "an encoding": BatchEncoding({"input_ids": A, "attention_mask": [1] * 5}),
    "an encoding of one text in a list": BatchEncoding({"input_ids": [A], "attention_mask": [[1] * 5]}),
    "an encoding as an array": BatchEncoding({"input_ids": A, "token_type_ids": [0] * 5}, tensor_type="np"),
    "an encoding as a tensor": BatchEncoding({"input_ids": [A], "attention_mask": [[1] * 5]}, tensor_type="pt"),
    "an encoding with padding": BatchEncoding({"input_ids": [*A, 9], "attention_mask": [1] * 5 + [0]}),
}
MANY: dict[str, Any] = {
    "lists": [A, B],
    "arrays": [np.array(A), torch.tensor(B)],
    "one array": np.array([A, A[::-1]]),
    "encodings": [BatchEncoding({"input_ids": A}), BatchEncoding({"input_ids": [B]}, tensor_type="pt")],
    "an encoding of two texts": BatchEncoding({"input_ids": [A, B], "attention_mask": [[1] * 5, [1] * 4]}),
    "with padding": PADDED,
    "with padding, as tensors": BatchEncoding(dict(PADDED), tensor_type="pt"),
    "rows that are tensors": {"input_ids": [torch.tensor(A), torch.tensor(B)]},
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = lively_qwen3(tmp_path_factory.getbasetemp() / "engine-checkpoints")
    with LLM(path, num_kv_blocks=8, skip_tokenizer_init=True) as llm:
        yield llm


def understood(llm: LLM, prompts: Any) -> list[list[int]]:
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, stop_token_ids=np.array([3])), use_tqdm=False)
    assert {type(token) for output in outputs for token in output.prompt_token_ids} == {int}
    return [output.prompt_token_ids for output in outputs]


@pytest.mark.parametrize("prompt", ONE.values(), ids=ONE)
def test_one_prompt(llm: LLM, prompt: Any) -> None:
    expected = list(prompt) if isinstance(prompt, range) else A
    assert understood(llm, prompt) == [expected]
    assert understood(llm, [prompt, B]) == [expected, B]


@pytest.mark.parametrize("prompts", MANY.values(), ids=MANY)
def test_many_prompts(llm: LLM, prompts: Any) -> None:
    second = A[::-1] if isinstance(prompts, np.ndarray) else B
    assert understood(llm, prompts) == [A, second]


def test_a_salt_stays_with_its_prompt() -> None:
    assert as_list({"input_ids": [A], "cache_salt": "mine"}) == [{"prompt_token_ids": A, "cache_salt": "mine"}]


@pytest.mark.parametrize("make", [np.array, torch.tensor, lambda ids: BatchEncoding({"input_ids": [ids]})])
def test_async_llm_takes_them_too(llm: LLM, make: Callable[[list[int]], Any]) -> None:
    async def run() -> None:
        async with AsyncLLM(llm.path, num_kv_blocks=8, skip_tokenizer_init=True) as served:
            async for output in served.generate(make(A), SamplingParams(max_tokens=1)):
                assert output.prompt_token_ids == A

    asyncio.run(run())


@pytest.mark.slow
def test_what_the_chat_template_returns_is_a_prompt(smollm2: Path) -> None:
    """In every form that `apply_chat_template` has: the same ids as `LLM.chat` makes."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    chat = [{"role": "user", "content": "Why is the sky blue?"}]
    with LLM(smollm2, num_kv_blocks=8, max_model_len=100) as llm:
        [expected] = [o.prompt_token_ids for o in llm.chat(chat, SamplingParams(max_tokens=1), use_tqdm=False)]
        for options in {}, {"return_dict": False}, {"return_tensors": "pt"}, {"return_tensors": "np"}:
            made = tokenizer.apply_chat_template(chat, add_generation_prompt=True, **options)
            assert understood(llm, made) == [expected]
        both = [chat, [*chat, {"role": "assistant", "content": "It scatters."}, chat[0]]]
        made = tokenizer.apply_chat_template(both, add_generation_prompt=True, padding=True, return_tensors="pt")
        assert [len(ids) for ids in understood(llm, made)] == made["attention_mask"].sum(1).tolist()
