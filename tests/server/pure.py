"""A model that is a pure function of the tokens before, in the story model's vocabulary: every bit can be compared."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.engine.engine import LLMEngine
from nanovllm.engine.plan import StepMasks, StepPlan, StepResult, TokenLogprobs
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.detokenizer import Detokenizer
from nanovllm.text.token_texts import TokenTexts
from nanovllm.text.tokenizer import Tokenizer

MODEL = Path(__file__).parents[2] / "assets" / "story_model"
VOCAB_SIZE = 4096
EOS = 0
WORDS = [*range(1500, 1560), 0, 130, 140, 150, 226, 227]  # words, EOS and single bytes that are no characters alone


class Step:
    def __init__(
        self,
        tokens: dict[int, tuple[list[int], list[TokenLogprobs] | None]],
        scores: dict[int, list[TokenLogprobs]],
    ) -> None:
        self.tokens, self.scores = tokens, scores

    def guesses(self) -> dict[int, list[int]]:
        return {}

    def draw(self, masks: StepMasks) -> None: ...

    def result(self) -> StepResult:
        return StepResult(self.tokens, self.scores)


class PureExecutor:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.sequences: dict[int, tuple[list[int], SamplingParams]] = {}

    def add(self, key: int, token_ids: Sequence[int], params: SamplingParams) -> None:
        self.sequences[key] = list(token_ids), params

    def remove(self, key: int) -> None:
        self.sequences.pop(key, None)

    def close(self) -> None: ...

    def submit(self, plan: StepPlan) -> Step:
        time.sleep(self.seconds)
        scores = {one.key: [self._score(one.key, i) for i in range(one.start, one.end)] for one in plan.scored}
        return Step({item.key: self._next(item.key) for item in plan.scheduled if item.sample}, scores)

    def _score(self, key: int, position: int) -> TokenLogprobs:
        token_ids, params = self.sequences.get(key, ([0] * (position + 2), SamplingParams()))
        likeliest = [(sum(token_ids[: position + 1]) * i) % VOCAB_SIZE for i in range(params.prompt_logprobs or 0)]
        return {id: (-id / 977, i + 1) for i, id in enumerate([token_ids[position + 1], *likeliest])}

    def _next(self, key: int) -> tuple[list[int], list[TokenLogprobs] | None]:
        token_ids, params = self.sequences.get(key, ([0], SamplingParams(seed=0)))
        mixed = hash((tuple(token_ids[-5:]), len(token_ids), params.seed if params.temperature else 0))
        token = WORDS[mixed % len(WORDS)]
        token_ids.append(token)
        if params.logprobs is None:
            return [token], None
        listed = [token, *((token + i * 7) % VOCAB_SIZE for i in range(1, params.logprobs + 1))]
        return [token], [{id: (-((mixed + i) % 10007) / 977, i + 1) for i, id in enumerate(listed)}]


class PureLLM:
    """As an engine's process has it; with `text`, as `LLM` is. `seconds`: what a step takes."""

    def __init__(self, text: bool = False, seconds: float = 0, **config: Any) -> None:
        self.path = MODEL
        small = {"num_kv_blocks": 64, "kvcache_block_size": 16, "max_model_len": 256, "max_num_seqs": 8}
        self.config = EngineConfig(**({"async_scheduling": True, "seed": 1} | small | config))
        self.sampling_defaults: dict[str, Any] = {}
        self.tokenizer = Tokenizer(MODEL)
        detokenizer = partial(Detokenizer, TokenTexts(self.tokenizer)) if text else None
        self.engine = LLMEngine(
            PureExecutor(seconds), self.config, vocab_size=VOCAB_SIZE, eos_token_ids={EOS}, make_detokenizer=detokenizer
        )

    def close(self) -> None:
        self.engine.close()

    def generate(self, prompt: str, params: Sequence[SamplingParams]) -> list[RequestOutput]:
        """Offline, for comparison."""
        ids, found = self.tokenizer.encode(prompt), dict[int, RequestOutput]()
        for i, one in enumerate(params):
            self.engine.add_request(str(i), ids, one)
        while self.engine.has_unfinished():
            found |= {int(output.request_id): output for output in self.engine.step() if output.finished}
        return [found[i] for i in range(len(params))]
