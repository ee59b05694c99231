"""Stage 1 with and without the causal mask: the same prompt, greedy, and what comes of it."""

import textwrap
from unittest.mock import patch

import torch.nn.functional as F
from torch import Tensor

from stages import stage_1_naive
from stages.core import SamplingParams
from tools.pictures.three_requests import STORY_MODEL, load_tokenizer

PROMPT = "Once upon a time there was a dormouse named Kofi, who had a red scarf."


def attend_without_mask(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).squeeze(0).transpose(0, 1)


tokenizer = load_tokenizer()
engine = stage_1_naive.NaiveEngine(STORY_MODEL)
for name, attend in (("with", stage_1_naive.attend_to_all), ("without", attend_without_mask)):
    with patch.object(stage_1_naive, "attend_to_all", attend):
        [tokens] = engine.generate([tokenizer.encode(PROMPT).ids], SamplingParams(temperature=0, max_tokens=29))
    print(f"{name} the mask:")
    print(textwrap.indent(textwrap.fill(tokenizer.decode(tokens).strip(), 80), "    "))
