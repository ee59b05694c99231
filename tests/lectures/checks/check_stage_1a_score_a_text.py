"""Exercise 1a: one pass says what stage 1 says token by token, and the model prefers the story that it was told."""

import math
from types import ModuleType

import pytest
import torch

from stages.core import SamplingParams, Sequence
from stages.stage_1_naive import NaiveEngine
from tools.pictures.three_requests import load_tokenizer

TEXT = "In Winterbourne everybody knew Mabel."
TOLD = "Once upon a time there was a dormouse named Kofi, who had a {colour} scarf."
ENDINGS = (" Kofi had a fine red scarf", " Kofi had a fine green scarf")


@pytest.fixture(scope="module")
def engine(story_model: str) -> NaiveEngine:
    return NaiveEngine(story_model)


def ids(text: str) -> list[int]:
    found: list[int] = load_tokenizer().encode(text).ids
    return found


@torch.inference_mode()
def one_by_one(engine: NaiveEngine, tokens: list[int]) -> list[float]:
    """The same numbers as stage 1 would find them: a pass for each token."""
    logs = []
    for i in range(1, len(tokens)):
        text = Sequence(0, tokens[:i], i, SamplingParams(), 0)
        logs.append(float(engine.next_token_logits(text)[0].log_softmax(-1)[tokens[i]]))
    return logs


def test_it_agrees_with_stage_1_in_one_pass(answers: ModuleType, engine: NaiveEngine) -> None:
    tokens = ids(TEXT)
    passes: list[int] = []
    hook = engine.model.register_forward_pre_hook(lambda _, inputs: passes.append(len(inputs[0])))
    logs = answers.log_probs(engine, tokens)
    hook.remove()
    assert len(logs) == len(tokens) - 1, "the first token is given, and nothing is said about the one after the last"
    assert logs == pytest.approx(one_by_one(engine, tokens), abs=1e-3)
    assert len(passes) == 1, "one pass is enough for the whole text"


def test_perplexity(answers: ModuleType, engine: NaiveEngine) -> None:
    tokens = ids(TEXT)
    logs = one_by_one(engine, tokens)
    found = answers.perplexity(engine, tokens)
    print(f"perplexity of {TEXT!r}: {found:.1f}; of the same words backwards: ", end="")
    print(f"{answers.perplexity(engine, tokens[::-1]):,.0f}")
    assert found == pytest.approx(math.exp(-sum(logs) / len(logs)), rel=1e-3)
    assert answers.perplexity(engine, tokens[::-1]) > 100 * found


@pytest.mark.parametrize(("colour", "index"), [("red", 0), ("green", 1)])
def test_the_model_keeps_to_the_story(answers: ModuleType, engine: NaiveEngine, colour: str, index: int) -> None:
    prompt = ids(TOLD.format(colour=colour))
    assert answers.preferred(engine, prompt, [ids(ending) for ending in ENDINGS]) == index


def test_a_whole_ending_counts_and_of_equals_the_first(answers: ModuleType, engine: NaiveEngine) -> None:
    prompt, ending = ids(TEXT), ids(ENDINGS[0])
    assert answers.preferred(engine, prompt, [[*ending, *ending], ending, ending]) == 1
