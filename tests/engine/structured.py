"""What the tests of structured outputs share: engines, requests of every kind, and what an output must look like."""

import json
import re
import shutil
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from tests.weights import lively_qwen3

ROOT = Path(__file__).parents[2]
STORY_MODEL = ROOT / "assets" / "story_model"
FILE = ROOT / "tests" / "data" / "story_prompts.json"
STORIES = [prompt[:50] for prompt in json.loads(FILE.read_text(encoding="utf-8"))["prompts"]]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Tom", "Anna", "Zoë"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEX = r"[A-Z][a-z]{2,6} went to the (park|sea)\."
CHOICE = ["Tom", "Tommy", "the dog", "a\nb"]
GRAMMAR = 'root ::= "(" root ")" | "[" root "]" | "x"'
KINDS: dict[str, StructuredOutputsParams] = {
    "json": StructuredOutputsParams(json=PERSON, disable_any_whitespace=True),
    "json with whitespace": StructuredOutputsParams(json=PERSON, whitespace_pattern="[ \n]"),
    "regex": StructuredOutputsParams(regex=REGEX),
    "choice": StructuredOutputsParams(choice=CHOICE),
    "grammar": StructuredOutputsParams(grammar=GRAMMAR),
}
SMALL: dict[str, Any] = {"kvcache_block_size": 4, "num_kv_blocks": 900, "max_model_len": 160, "async_scheduling": False}
TIGHT = SMALL | {"num_kv_blocks": 40, "max_num_seqs": 6, "max_num_batched_tokens": 24}
DRAFT = {"model": ROOT / "assets" / "story_draft", "k": 4}
NGRAM = {"method": "ngram", "k": 4, "n": 1}


def matches(kind: str, text: str) -> bool:
    if kind.startswith("json"):
        person = json.loads(text)
        tags = person["tags"]
        return (
            list(person) == ["name", "age", "tags"]
            and person["name"] in ("Tom", "Anna", "Zoë")
            and type(person["age"]) is int
            and 1 <= person["age"] <= 99
            and len(tags) <= 2
            and all(isinstance(tag, str) and len(tag) <= 8 for tag in tags)
        )
    if kind == "grammar":
        while text != "x":
            if (text[:1], text[-1:]) not in {("(", ")"), ("[", "]")}:
                return False
            text = text[1:-1]
        return True
    return text in CHOICE if kind == "choice" else re.fullmatch(REGEX, text) is not None


def check(kind: str, output: RequestOutput, eos: Container[int] = (0,)) -> None:
    """Each choice is whole, and ended by EOS; or it is the beginning of something that `max_tokens` cut."""
    for choice in output.outputs:
        if choice.finish_reason == "stop":
            assert matches(kind, choice.text), (kind, choice.text)
            assert choice.token_ids[-1] in eos and choice.stop_reason is None
        else:
            assert choice.finish_reason == "length" and choice.token_ids[-1] not in eos, (kind, choice)


def mixed(seed: int, temperature: float = 1.0, **more: Any) -> list[tuple[str | None, SamplingParams]]:
    """Two plain requests among one of each kind."""
    params: dict[str, Any] = {"temperature": temperature, "max_tokens": 60, **more}
    asked: list[tuple[str | None, SamplingParams]] = [
        (kind, SamplingParams(structured_outputs=structure, seed=seed + i, **params))
        for i, (kind, structure) in enumerate(KINDS.items())
    ]
    plain = SamplingParams(temperature=temperature, seed=seed, max_tokens=12)
    filtered = SamplingParams(temperature=temperature, seed=seed, max_tokens=12, top_k=9, presence_penalty=0.5)
    return [(None, plain), *asked, (None, filtered)]


def generate(llm: LLM, asked: list[tuple[str | None, SamplingParams]]) -> list[RequestOutput]:
    found = llm.generate(STORIES[: len(asked)], [params for _, params in asked], use_tqdm=False)
    for (kind, _), output in zip(asked, found, strict=True):
        if kind is not None:
            check(kind, output)
    assert llm.engine.scheduler.blocks.num_free == llm.engine.scheduler.num_kv_blocks
    assert llm.engine.scheduler.num_matchers == 0
    return found


def ids(found: list[RequestOutput]) -> list[list[int]]:
    return [choice.token_ids for output in found for choice in output.outputs]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, for which every text is as good as another, and more ids than the tokenizer has."""
    path = lively_qwen3(tmp_path_factory.mktemp("lively"), num_hidden_layers=1, vocab_size=4200, eos_token_ids=[0])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(STORY_MODEL / name, path / name)
    return path


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def asynchronous(model: Path) -> Iterator[LLM]:
    with LLM(model, **SMALL | {"async_scheduling": True}) as llm:
        yield llm


@pytest.fixture(scope="module")
def story() -> Iterator[LLM]:
    with LLM(STORY_MODEL, **SMALL) as llm:
        yield llm
