"""The engine as a contender beside the stages and Hugging Face (`benchmarks/lib/worker.py` says what a runner is)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.lib.recorder import CallRecorder
from benchmarks.lib.roofline import num_parameters
from benchmarks.lib.worker import BLOCK_SIZE
from benchmarks.lib.workloads import Request, Scenario
from nanovllm import LLM, SamplingParams
from nanovllm.models.config import read_config


class EngineRunner:
    """`nanovllm.LLM`, built anew for every scenario with the scenario's limits; greedy, token ids in and out."""

    def __init__(self, model: str, device: str) -> None:
        self.model, self.device = model, device
        self.num_parameters = num_parameters(read_config(Path(model)))["all"]
        self.vocab_size = 0
        self.recorder: CallRecorder | None = None
        self.first = 0  # the engine numbers its requests over all calls, a recorder those of its own

    def prepare(self, scenario: Scenario) -> None:
        self.llm = LLM(
            self.model,
            device=self.device,
            skip_tokenizer_init=True,
            on_event=self.on_event,
            max_num_seqs=scenario.max_num_seqs,
            kvcache_block_size=BLOCK_SIZE,
            num_kv_blocks=scenario.num_blocks(BLOCK_SIZE),
        )
        self.vocab_size = self.llm.engine.vocab_size
        self.first = 0

    def on_event(self, event: dict[str, Any]) -> None:
        if self.recorder is not None:
            self.recorder.on_event({**event, "request": int(event["request"]) - self.first})

    def generate(self, requests: list[Request], recorder: CallRecorder) -> list[list[int]]:
        self.recorder = recorder
        params = [SamplingParams(temperature=0, max_tokens=r.max_tokens, ignore_eos=True) for r in requests]
        outputs = self.llm.generate([r.prompt for r in requests], params, use_tqdm=False)
        self.first += len(requests)
        return [output.outputs[0].token_ids for output in outputs]
