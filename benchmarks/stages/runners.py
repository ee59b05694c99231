"""Who generates in the showcases: a stage, Hugging Face or the engine, each with the scenario's limits; greedy.

`measure` is what a process does for one contender. Model and libraries are loaded and warmed up before the clock
starts. Token times, memory held and preemptions come from the events of stages and engine, and from a stopping
criterion of Hugging Face's `generate` that only looks at the clock.
"""

import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.lib.harness import Contender, Measured
from benchmarks.lib.process import CLOCKS, ClockName, Engine, synchronize
from benchmarks.lib.workloads import BLOCK_SIZE, Request, Scenario
from nanovllm.trace_view.engine_state import EngineState
from stages.core import SamplingParams
from stages.manifest import load_stage
from stages.model import Attend, Transformer
from stages.stage_6_cuda_graphs import CUDAGraphEngine
from tools.exercises import mine


def stage_contender(number: int, only: tuple[str, ...] | None = None, name: str = "", **options: Any) -> Contender:
    """Stage `number`. options: of its engine, besides the limits of the scenarios. only: the scenarios that it takes
    part in (None: all)."""
    spec = {"kind": "stage", "number": number, "options": options}
    return Contender(name or f"stage {number}", arguments={"spec": spec, "only": only})


def hf_contender(
    name: str, *, batch: bool = False, cache: bool = True, limited: bool = True, only: tuple[str, ...] | None = None
) -> Contender:
    """`limited=False` lets it have as much KV memory as it wants, whatever the others have."""
    spec = {"kind": "hf", "batch": batch, "use_cache": cache, "limited": limited}
    return Contender(name, arguments={"spec": spec, "only": only})


# --- what is read off a run -------------------------------------------------------------------------------------------


class CallRecorder:
    """One call of `generate`: give it the events, or tokens and rectangles. Times are in seconds of `clock`."""

    def __init__(self, requests: list[Request], block_size: int, clock: ClockName) -> None:
        self.clock = CLOCKS[clock]
        self.requests = requests
        self.block_size = block_size
        self.token_times: list[list[float]] = [[] for _ in requests]
        self.preemptions = 0
        self.state = EngineState()
        self.held_at_end: dict[int, int] = {}  # blocks of a stage's sequences that are over and will free them next
        self.most_at_once = 0  # sequences with KV memory of their own
        self.peak_slots = 0  # tokens' worth of memory in use, shared blocks counted once
        self.reserved_slots = 0  # summed over the sequences, each at its end

    def on_event(self, event: dict[str, Any]) -> None:
        kind, request = event["type"], event["request"]
        if kind == "token":
            self.token_times[request] += [self.clock()] * len(event["ids"])
        elif kind != "scheduled":  # neither of these two moves blocks, and they come in every step
            self.preemptions += kind == "preempted"
            if kind == "finished":
                self.held_at_end[request] = len(self.state.tables.get(request, ()))
            self.state.hear(event)
            if kind == "blocks":
                self.reserved_slots += self.held_at_end.pop(request, 0) * self.block_size
                self.most_at_once = max(self.most_at_once, len(self.state.tables))
                self.peak_slots = max(self.peak_slots, len(self.state.owners) * self.block_size)

    def on_rectangle(self, rows: int, length: int) -> None:
        """A contiguous cache of `rows` sequences of `length` tokens each, which all hold it to the end."""
        self.most_at_once = max(self.most_at_once, rows)
        self.peak_slots = max(self.peak_slots, rows * length)
        self.reserved_slots += rows * length


def metrics(
    calls: list[tuple[CallRecorder, float, float]], outputs: list[list[list[int]]], wall_seconds: float
) -> dict[str, Any]:
    """The figures of a scenario. `calls`: recorder, start and end of each call; `outputs`: tokens a request a call.

    Raises ValueError if a request did not get exactly the tokens that it was to get.
    """
    recorders = [recorder for recorder, _, _ in calls]
    for recorder, call in zip(recorders, outputs, strict=True):
        wanted = [request.max_tokens for request in recorder.requests]
        if [len(tokens) for tokens in call] != wanted or [len(times) for times in recorder.token_times] != wanted:
            raise ValueError(f"wrong number of tokens: wanted {wanted}, got {[len(tokens) for tokens in call]}")
    first_tokens = [times[0] - start for recorder, start, _ in calls for times in recorder.token_times]
    gaps = [b - a for recorder in recorders for times in recorder.token_times for a, b in pairwise(times)]
    seconds = sum(end - start for _, start, end in calls)
    num_tokens = sum(len(tokens) for call in outputs for tokens in call)
    reserved = sum(recorder.reserved_slots for recorder in recorders)
    # The last token is never fed back, so it has no key and value
    filled = sum(request.length - 1 for recorder in recorders for request in recorder.requests)
    return {
        "seconds": seconds,
        "wall_seconds": wall_seconds,
        "output_tokens": num_tokens,
        "tokens_per_second": num_tokens / seconds,
        "ms_per_token": 1000 * seconds / num_tokens,
        "ttft_ms": 1000 * statistics.mean(first_tokens),
        "decode_ms": 1000 * statistics.median(gaps) if gaps else None,
        "most_at_once": max(recorder.most_at_once for recorder in recorders) or None,
        "peak_slots": max(recorder.peak_slots for recorder in recorders) or None,
        "waste_percent": 100 * (1 - filled / reserved) if reserved else None,
        "preemptions": sum(recorder.preemptions for recorder in recorders),
        "tokens_digest": hashlib.sha256(json.dumps(outputs).encode()).hexdigest()[:16],
    }


# --- who generates ----------------------------------------------------------------------------------------------------


class CompiledModel:
    """A second model of the same weights, whose layers are compiled piece by piece around the call of attention."""

    def __init__(self, model: Transformer) -> None:
        torch.compiler.reset()  # the layers compiled for earlier engines count against a limit
        self.model = deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
        for layer in self.model.layers:
            layer.compile(dynamic=True)
        self.attend: Attend
        # One function for all calls: for each new one the layers would be compiled again
        self.attend_outside: Any = torch.compiler.disable(lambda *inputs: self.attend(*inputs))

    def __call__(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """input_ids [T], positions [T] -> hidden [T, H]"""
        self.attend = attend
        hidden: Tensor = self.model(input_ids, positions, self.attend_outside)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)


class CompiledEngine(CUDAGraphEngine):
    """Stage 6, recording the compiled model. Steps that are not replayed use the other one, as it is."""

    def record(self) -> Any:
        self.compiled: Any = CompiledModel(self.model)
        return super().record()

    def decode_step(self, bucket: int) -> Tensor:
        model, self.model = self.model, self.compiled
        try:
            return super().decode_step(bucket)
        finally:
            self.model = model


class Runner:
    """What generates, with its model's vocabulary. `recorder` hears the events of the call under way."""

    vocab_size: int = 0
    recorder: CallRecorder | None = None

    def on_event(self, event: dict[str, Any]) -> None:
        if self.recorder is not None:
            self.recorder.on_event(event)

    def prepare(self, scenario: Scenario) -> None:
        """Get ready for a scenario: nothing of earlier ones may be left in a cache."""
        raise NotImplementedError

    def generate(self, requests: list[Request], recorder: CallRecorder) -> list[list[int]]:
        """The tokens of each request."""
        raise NotImplementedError

    def memory(self) -> dict[str, float]:
        """MiB of weights, and of room for keys and values, that this process holds, where they can be looked at."""
        return {}


def mib(model: torch.nn.Module) -> float:
    return sum(p.nbytes for p in model.parameters()) / 2**20


class StageRunner(Runner):
    """An engine of `stages/`, or the learner's in `exercises/`, built anew for every scenario with its limits."""

    def __init__(
        self,
        model: str,
        device: str,
        *,
        number: int,
        options: dict[str, Any],
        compiled: bool = False,
        impl: Literal["stages", "exercises"] = "stages",
    ) -> None:
        self.stage, self.options = load_stage(number), options
        self.engine_class: Any = CompiledEngine if compiled else mine.engine_class(self.stage, impl)
        self.model, self.device = model, device
        self.engine: Any = None
        if number == 2:
            self.watch_static_cache()

    def watch_static_cache(self) -> None:
        """Stage 2 has no blocks to tell of, so the rectangle that it allocates is looked at as it is made."""
        runner = self
        module: Any = sys.modules[self.engine_class.__module__]

        class WatchedKVCache(module.KVCache):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                if runner.recorder is not None:
                    runner.recorder.on_rectangle(*self.k.shape[1:3])

        module.KVCache = WatchedKVCache

    def prepare(self, scenario: Scenario) -> None:
        options = scenario.limits(self.stage) | self.options
        self.engine = None  # the one before goes first, with its memory and its processes
        self.engine = self.engine_class(self.model, device=self.device, on_event=self.on_event, **options)
        self.vocab_size = self.engine.config.vocab_size

    def generate(self, requests: list[Request], recorder: CallRecorder) -> list[list[int]]:
        self.recorder = recorder
        params = [SamplingParams(temperature=0, max_tokens=r.max_tokens, ignore_eos=True) for r in requests]
        outputs: list[list[int]] = self.engine.generate([r.prompt for r in requests], params)
        return outputs

    def memory(self) -> dict[str, float]:
        found = {"weights_mib": mib(self.engine.model)}
        if cache := getattr(self.engine, "cache", None):
            found["kv_mib"] = (cache.k.nbytes + cache.v.nbytes) / 2**20
        return found


class EngineRunner(Runner):
    """`nanovllm.LLM`, built anew for every scenario with the scenario's limits; token ids in and out."""

    def __init__(self, model: str, device: str) -> None:
        self.model, self.device = model, device
        self.started: int = 0  # requests of earlier calls: the engine numbers them on, a recorder has its own

    def prepare(self, scenario: Scenario) -> None:
        limits = {"max_num_seqs": scenario.max_num_seqs, "num_kv_blocks": scenario.num_blocks}
        options = {"device": self.device, "kvcache_block_size": BLOCK_SIZE, "on_event": self.on_event, **limits}
        self.engine = Engine("nanovllm", self.model, options, time.time())
        self.vocab_size = self.engine.llm.engine.vocab_size
        self.started = 0

    def on_event(self, event: dict[str, Any]) -> None:
        super().on_event({**event, "request": int(event["request"]) - self.started})

    def generate(self, requests: list[Request], recorder: CallRecorder) -> list[list[int]]:
        self.recorder = recorder
        outputs = self.engine.generate([r.prompt for r in requests], [r.max_tokens for r in requests])
        self.started += len(requests)
        return [output.outputs[0].token_ids for output in outputs]


class HuggingFaceRunner(Runner):
    """`batch=False` serves one request after the other, `batch=True` static batches padded on the left.

    The model knows no EOS here, so that each row gets as many tokens as are asked for (`min_new_tokens` would do that
    too, but at the price of a logits processor in every step). A batch runs as long as its longest request; what the
    other rows get beyond their own length is dropped and not counted.
    """

    def __init__(self, model: str, device: str, *, batch: bool, use_cache: bool, limited: bool) -> None:
        from transformers import AutoModelForCausalLM  # takes seconds to import
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.backends.cuda.enable_cudnn_sdp(False)  # as in the stages: it would plan anew for every length
        # As the stages: the checkpoint's own dtype on a GPU, float32 on a CPU
        dtype = torch.float32 if torch.device(device).type == "cpu" else "auto"
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self.model.to(device).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0
        self.device = device
        self.batch, self.use_cache, self.limited = batch, use_cache, limited
        self.num_rows = 1
        self.vocab_size = self.model.config.vocab_size

    def prepare(self, scenario: Scenario) -> None:
        requests = [request for call in scenario.calls for request in call]
        # A row may have to hold the longest prompt's padding and the longest output
        row_length = max(len(r.prompt) for r in requests) + max(r.max_tokens for r in requests)
        rows = scenario.num_rows(row_length) if self.limited else scenario.max_num_seqs
        self.num_rows = rows if self.batch else 1

    def generate(self, requests: list[Request], recorder: CallRecorder) -> list[list[int]]:
        outputs: list[list[int]] = []
        for start in range(0, len(requests), self.num_rows):
            rows = requests[start : start + self.num_rows]
            tokens, times = self.generate_rectangle(rows, recorder)
            for i, request in enumerate(rows):
                outputs.append(tokens[i][: request.max_tokens])
                recorder.token_times[start + i] = times[: request.max_tokens]
        return outputs

    def generate_rectangle(self, rows: list[Request], recorder: CallRecorder) -> tuple[list[list[int]], list[float]]:
        """New tokens of every row, as many as the longest needs, and when each column of them was there."""
        longest = max(len(row.prompt) for row in rows)
        padded = [[0] * (longest - len(row.prompt)) + row.prompt for row in rows]
        mask = [[0] * (longest - len(row.prompt)) + [1] * len(row.prompt) for row in rows]
        times: list[float] = []
        result = self.model.generate(
            torch.tensor(padded, device=self.device),  # [B, L]
            attention_mask=torch.tensor(mask, device=self.device),
            max_new_tokens=max(row.max_tokens for row in rows),
            do_sample=False,
            use_cache=self.use_cache,
            stopping_criteria=[look_at_the_clock(recorder.clock, times)],
            return_dict_in_generate=True,
        )
        if self.use_cache:
            recorder.on_rectangle(len(rows), result.past_key_values.get_seq_length())
        tokens: list[list[int]] = result.sequences[:, longest:].tolist()
        return tokens, times

    def memory(self) -> dict[str, float]:
        return {"weights_mib": mib(self.model)}


def look_at_the_clock(clock: Callable[[], float], times: list[float]) -> Callable[..., torch.Tensor]:
    """A stopping criterion that never stops anything. It is asked after every token, and then notes the time."""

    def never(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize()  # `generate` waits for the step at this point in any case
        times.append(clock())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    return never


RUNNERS: dict[str, Callable[..., Runner]] = {"stage": StageRunner, "engine": EngineRunner, "hf": HuggingFaceRunner}


def measure(
    spec: dict[str, Any],
    model: str,
    device: str,
    clock: ClockName,
    scenarios: list[dict[str, Any]],
    only: list[str] | None = None,
) -> list[Measured]:
    """In the process of one contender: the metrics of each of its scenarios."""
    options = {name: value for name, value in spec.items() if name != "kind"}
    runner = RUNNERS[spec["kind"]](model, device, **options)
    mine = [Scenario.from_json(raw) for raw in scenarios if only is None or raw["name"] in only]
    return [{s.name: run_scenario(runner, s, device, clock) for s in mine}]


def run_scenario(runner: Runner, scenario: Scenario, device: str, clock: ClockName) -> dict[str, Any]:
    runner.prepare(scenario)
    warm_up = scenario.warm_up(runner.vocab_size)
    runner.generate(warm_up, CallRecorder(warm_up, BLOCK_SIZE, clock))
    calls, outputs = [], []
    wall_start = time.perf_counter()
    for requests in scenario.calls:
        recorder = CallRecorder(requests, BLOCK_SIZE, clock)
        synchronize(device)
        start = CLOCKS[clock]()
        outputs.append(runner.generate(requests, recorder))
        synchronize(device)
        calls.append((recorder, start, CLOCKS[clock]()))
    return metrics(calls, outputs, time.perf_counter() - wall_start) | runner.memory()
