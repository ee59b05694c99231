"""A twin for whole checkpoints: text in, text out, with more rows in the model than the tokenizer has tokens."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from nanovllm import LLM, SamplingParams
from tests import oracle
from tests.models.twins import CHATS, TEXTS, Kind, make_checkpoint
from tests.weights import lively_qwen3, random_llama, random_qwen2

ROWS = 640
CHECKPOINTS: list[tuple[Callable[..., Path], Kind]] = [
    (random_llama, Kind(template="Llama 3", bos="both", specials="both", eos="<|end|>")),
    (lively_qwen3, Kind(template="Qwen", declared="Qwen2Tokenizer", family="qwen3", specials="added_tokens.json")),
    (random_llama, Kind(model="byte fallback", template="Llama 2", declared="LlamaTokenizer", bos="post-processor")),
    (random_qwen2, Kind(model="unigram", template="Gemma", family="qwen2", specials="special_tokens_map")),
]


@pytest.mark.parametrize(
    ("build", "kind"),
    [pytest.param(*case, marks=() if i < 2 else pytest.mark.slow) for i, case in enumerate(CHECKPOINTS)],
    ids=lambda case: case.model if isinstance(case, Kind) else None,
)
def test_text_in_and_text_out(build: Callable[..., Path], kind: Kind, checkpoints: Path, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", kind, build(checkpoints, vocab_size=ROWS))
    theirs = AutoTokenizer.from_pretrained(path)
    prompts = [text for text in TEXTS if text]
    greedy = SamplingParams(temperature=0, max_tokens=24)
    with LLM(path, num_kv_blocks=100, max_model_len=256) as llm:
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        prompt_ids, ids = [o.prompt_token_ids for o in outputs], [o.outputs[0].token_ids for o in outputs]
        assert prompt_ids == [theirs(prompt)["input_ids"] for prompt in prompts]
        oracle.check_greedy(path, prompt_ids, ids, [greedy] * len(ids))
        assert any(token >= len(theirs) for output in ids for token in output), "no row beyond the tokenizer"
        for output, found in zip(ids, outputs, strict=True):
            spoken = output[:-1] if found.outputs[0].finish_reason == "stop" else output
            assert found.outputs[0].text == theirs.decode(
                spoken, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        [answer] = llm.chat(CHATS[1][:1], greedy, use_tqdm=False)
        chat = theirs.apply_chat_template(CHATS[1][:1], add_generation_prompt=True)["input_ids"]
        assert answer.prompt_token_ids == chat
        oracle.check_greedy(path, [chat], [answer.outputs[0].token_ids], [greedy])
        [answer] = llm.chat(CHATS[1], greedy, use_tqdm=False, add_generation_prompt=False)
        chat = theirs.apply_chat_template(CHATS[1], add_generation_prompt=False)["input_ids"]
        assert answer.prompt_token_ids == chat
