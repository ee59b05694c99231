"""How probable the model finds each word of a text, given those before it (exercise 1a writes this function)."""

import torch

from stages.stage_1_naive import NaiveEngine, attend_to_all
from tools.pictures.three_requests import STORY_MODEL, load_tokenizer

TEXT = "In Winterbourne everybody knew Mabel. Who else had a fine violet"

engine = NaiveEngine(STORY_MODEL)
encoding = load_tokenizer().encode(TEXT)
tokens = torch.tensor(encoding.ids)  # [T]
with torch.inference_mode():
    hidden = engine.model(tokens, torch.arange(len(tokens)), attend_to_all)  # [T, H]
    odds = engine.model.logits(hidden[:-1]).softmax(-1)  # [T - 1, V]
pieces = [TEXT[start:stop].strip() for start, stop in encoding.offsets]
percents = ["", *(f"{float(row[token]):.0%}" for row, token in zip(odds, tokens[1:], strict=True))]
widths = [max(map(len, pair)) for pair in zip(pieces, percents, strict=True)]
end = pieces.index(".") + 1  # of the first sentence
for sentence in (slice(end), slice(end, None)):
    for row in (pieces, percents):
        print(" ".join(f"{text:>{width}}" for text, width in zip(row[sentence], widths[sentence], strict=True)))
