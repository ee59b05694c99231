"""One prompt at three temperatures, with one seed: what the model tells."""

from stages.core import SamplingParams
from stages.stage_1_naive import NaiveEngine
from tools.pictures.three_requests import STORY_MODEL, load_tokenizer

PROMPT = "In Winterbourne everybody knew Mabel."

tokenizer = load_tokenizer()
engine = NaiveEngine(STORY_MODEL)
for temperature in (0, 0.7, 2):
    params = SamplingParams(temperature=temperature, max_tokens=16, seed=1)
    [tokens] = engine.generate([tokenizer.encode(PROMPT).ids], params)
    print(f"{temperature:<4} {tokenizer.decode(tokens).strip()}")
