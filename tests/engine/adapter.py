"""The engine behind the face of a stage, so that the stages' conformance suite runs over it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanovllm import LLM
from nanovllm import SamplingParams as EngineParams
from stages.core import Event, SamplingParams

RENAMED = {"block_size": "kvcache_block_size", "num_blocks": "num_kv_blocks"}
OPTIONS = {"block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens"}
DTYPES = {"torch.float32": "float32", "torch.bfloat16": "bfloat16", "torch.float16": "float16"}


class EngineAsStage:
    """`LLM` with a stage's arguments, parameters, outputs and events. Requests are numbered anew in each call."""

    def __init__(self, path: Path, on_event: Callable[[Event], None] | None = None, **options: Any) -> None:
        if "dtype" in options:
            options["dtype"] = DTYPES[str(options["dtype"])]
        config = {RENAMED.get(name, name): value for name, value in options.items()}
        self.on_event, self.base = on_event, 0
        self.llm = LLM(path, skip_tokenizer_init=True, on_event=on_event and self.tell, **config)
        self.eos_token_ids = self.llm.engine.eos_token_ids
        self.vocab_size = self.llm.engine.vocab_size

    def tell(self, event: Event) -> None:
        assert self.on_event is not None
        self.on_event(event | {"request": int(event["request"]) - self.base})

    @property
    def model(self) -> Any:
        return self.llm.engine.executor.runner.target.model

    @model.setter
    def model(self, model: Any) -> None:
        self.llm.engine.executor.runner.target.model = model

    def generate(self, prompts: list[list[int]], params: Any) -> list[list[int]]:
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [translate(p) for p in params] if isinstance(params, list) else translate(params),
            use_tqdm=False,
        )
        self.base += len(outputs)
        return [output.outputs[0].token_ids for output in outputs]


def translate(p: SamplingParams) -> EngineParams:
    return EngineParams(temperature=p.temperature, max_tokens=p.max_tokens, ignore_eos=p.ignore_eos, seed=p.seed)


@dataclass(frozen=True)
class EngineSubject:
    """The engine under one configuration; see `tests.stages.subject.Subject`."""

    config: dict[str, Any] = field(default_factory=dict)
    number: int = 8
    recomputes: bool = False
    options: frozenset[str] = frozenset(OPTIONS)

    def engine(self, path: Path, **options: Any) -> EngineAsStage:
        """A fresh engine: a stage's options, over which this configuration has the last word."""
        memory = {} if "num_blocks" in options else {"kv_cache_gib": 0.05}
        return EngineAsStage(path, **memory | options | self.config)

    def check_idle(self, engine: EngineAsStage) -> None:
        core = engine.llm.engine
        assert not core.has_unfinished() and not core.scheduler.running and not core.scheduler.sequences
        blocks = core.scheduler.blocks
        assert blocks.num_free == blocks.num_blocks and not any(blocks.ref_counts)
        assert not core.executor.sequences
