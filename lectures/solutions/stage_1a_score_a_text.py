"""Solution of exercise 1a. Row i of the logits is about token i + 1, so one of the two is shifted by one."""

import math

import torch

from stages.stage_1_naive import NaiveEngine, attend_to_all


@torch.inference_mode()
def log_probs(engine: NaiveEngine, tokens: list[int]) -> list[float]:
    # exercise 1a: the log of the probability of every token but the first
    input_ids = torch.tensor(tokens, device=engine.device)  # [T]
    positions = torch.arange(len(tokens), device=engine.device)  # [T]
    hidden = engine.model(input_ids, positions, attend_to_all)  # [T, H]
    expected = engine.model.logits(hidden[:-1]).log_softmax(-1)  # [T - 1, V]
    found: list[float] = expected[torch.arange(len(tokens) - 1), input_ids[1:]].tolist()
    return found
    # end exercise


def perplexity(engine: NaiveEngine, tokens: list[int]) -> float:
    # exercise 1a: exp of minus the mean of the logs
    logs = log_probs(engine, tokens)
    return math.exp(-sum(logs) / len(logs))
    # end exercise


def preferred(engine: NaiveEngine, prompt: list[int], endings: list[list[int]]) -> int:
    # exercise 1a: the index of the most probable ending
    totals = [sum(log_probs(engine, prompt + ending)[len(prompt) - 1 :]) for ending in endings]
    return totals.index(max(totals))
    # end exercise
