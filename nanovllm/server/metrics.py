"""Figures for Prometheus: every name and label that vLLM's public Grafana dashboard asks for, and answers by status."""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from nanovllm.engine.scheduler import Scheduler
from nanovllm.outputs import RequestOutput
from nanovllm.server.interface import Counted
from nanovllm.stream import EngineDead

# Upper bounds of buckets: vLLM's, and for gaps some that are smaller.
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
EACH_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
LATENCY = (0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
TOKENS = (*(digit * 10**power for power in range(6) for digit in (1, 2, 5)), 10**6)

REASONS = "stop", "length", "abort", "error"

# By name: a help text, and the names of labels beside `model_name` and `engine`.
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "vllm:prompt_tokens": ("Tokens of the prompts of requests that got a token.", ()),
    "vllm:generation_tokens": ("Tokens drawn, those of a request with stop strings at its end.", ()),
    "vllm:prefix_cache_queries": ("Prompt tokens that were looked up in the prefix cache.", ()),
    "vllm:prefix_cache_hits": ("Those of them that were found there.", ()),
    "vllm:num_preemptions": ("Preemptions of finished requests.", ()),
    "vllm:request_success": ("Requests that are over, by what ended their first choice.", ("finished_reason",)),
    "http_requests": ("Answers by path, method and status.", ("handler", "method", "status")),
    "http_connections_refused": ("Connections that were closed without an answer, by reason.", ("reason",)),
}
# By name: a help text, and the upper bounds of the buckets. All are of requests that finished, but for the first two.
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "vllm:time_to_first_token_seconds": ("From the arrival of a request to its first token.", FIRST_TOKEN),
    "vllm:inter_token_latency_seconds": ("From one token to the next, as they are handed out.", EACH_TOKEN),
    "vllm:request_time_per_output_token_seconds": ("Mean time of a request's tokens after the first.", EACH_TOKEN),
    "vllm:e2e_request_latency_seconds": ("From the arrival of a request to its end.", LATENCY),
    "vllm:request_queue_time_seconds": ("From the arrival of a request to its seat in the batch.", LATENCY),
    "vllm:request_inference_time_seconds": ("From its seat to its end.", LATENCY),
    "vllm:request_prefill_time_seconds": ("From its seat to its first token.", LATENCY),
    "vllm:request_decode_time_seconds": ("From its first token to its end.", LATENCY),
    "vllm:request_prompt_tokens": ("Tokens of a prompt.", TOKENS),
    "vllm:request_generation_tokens": ("Tokens of a choice.", TOKENS),
    "vllm:request_max_num_generation_tokens": ("Tokens of the longest choice of a request.", TOKENS),
}


class Figures:
    """Counters by their labels, and histograms: the observations in each bucket, those above the last, their sum."""

    def __init__(self, prefix_caching: bool = True) -> None:
        self.created, self.prefix_caching = time.time(), prefix_caching
        self.counters: dict[str, dict[tuple[str, ...], float]] = {
            name: {} if labels else {(): 0} for name, (_, labels) in COUNTERS.items()
        }
        self.counters["vllm:request_success"] = {(reason,): 0 for reason in REASONS}
        self.histograms: dict[str, list[float]] = {
            name: [0] * (len(bounds) + 2) for name, (_, bounds) in HISTOGRAMS.items()
        }

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        counter = self.counters[name]
        counter[labels] = counter.get(labels, 0) + by

    def observe(self, name: str, value: float, times: int = 1) -> None:
        numbers = self.histograms[name]
        numbers[bisect_left(HISTOGRAMS[name][1], value)] += times
        numbers[-1] += value * times


class Metrics(Collector):
    """What /metrics says: the figures, and the state of the engine at the time of asking."""

    def __init__(self, llm: Counted, model_name: str) -> None:
        self.figures = Figures(llm.llm.engine.config.enable_prefix_caching)
        self._llm = llm
        self._labels = {"model_name": model_name, "engine": "0"}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    async def scrape(self) -> bytes:
        return self.text()

    def count(self, name: str, *labels: str) -> None:
        self.figures.count(name, *labels)

    def observe(self) -> "RequestObserver":
        return RequestObserver(self.figures)

    def collect(self) -> Iterator[Metric]:
        for name, help, value in engine_state(self._llm):
            yield self._family(GaugeMetricFamily, name, help, [((), value)])
        for name, (help, labels) in COUNTERS.items():
            samples, created = list(self.figures.counters[name].items()), self.figures.created
            yield self._family(CounterMetricFamily, name, help, samples, labels, created=created)
        for name, (help, bounds) in HISTOGRAMS.items():
            *numbers, total = self.figures.histograms[name]
            buckets = zip([*map(str, map(float, bounds)), "+Inf"], accumulate(numbers), strict=True)
            yield self._family(HistogramMetricFamily, name, help, [((), list(buckets))], sum_value=total)
        scheduler: Scheduler = self._llm.llm.engine.scheduler
        if scheduler.proposer is not None:
            yield from self._speculation(scheduler)

    def _family(
        self, kind: Any, name: str, help: str, samples: Iterable[tuple[Sequence[str], Any]],
        labels: Sequence[str] = (), **more: Any,
    ) -> Metric:  # fmt: skip
        """samples: values, each with the values of its `labels`. All samples also have the labels of the server."""
        family = kind(name, help, labels=[*self._labels, *labels])
        for own, value in samples:
            family.add_metric([*self._labels.values(), *own], value, **more)
        return family

    def _speculation(self, scheduler: Scheduler) -> Iterator[Metric]:
        """The scheduler's counts of guessed tokens. A draft is what one step guesses for one sequence; position 0 is
        its first token. Divided by `num_draft_tokens`, `num_accepted_tokens` gives the acceptance rate."""
        stats, prefix = scheduler.speculation, "vllm:spec_decode_num"
        accepted = list(stats.accepted)  # the step loop goes on counting meanwhile
        for name, help, number in (
            ("drafts", "Drafts that were verified.", stats.num_steps),
            ("draft_tokens", "Tokens in these drafts.", sum(stats.proposed)),
            ("accepted_tokens", "Those that were accepted.", sum(accepted)),
        ):
            yield self._family(CounterMetricFamily, f"{prefix}_{name}", help, [((), number)])
        accepted += [0] * (scheduler.max_guesses - len(accepted))  # also positions that no draft has reached yet
        by_position = [([str(position)], number) for position, number in enumerate(accepted)]
        name, help = f"{prefix}_accepted_tokens_per_pos", "The same, by position in the draft."
        yield self._family(CounterMetricFamily, name, help, by_position, ["position"])


def engine_state(llm: Counted) -> Iterator[tuple[str, str, float]]:
    """Name, help text and value of each gauge."""
    scheduler: Scheduler = llm.llm.engine.scheduler
    try:
        llm.check_health()
        alive = 1
    except EngineDead:
        alive = 0
    yield "nanovllm:engine_alive", "1 while requests are served.", alive
    yield "vllm:num_requests_running", "Sequences that have a seat in the batch.", llm.llm.engine.num_running
    yield "vllm:num_requests_waiting", "Sequences that wait for one, or were preempted.", llm.num_waiting
    used = 1 - scheduler.blocks.num_free / scheduler.num_kv_blocks
    yield "vllm:kv_cache_usage_perc", "Share of the KV blocks that sequences hold; 1 is all of them.", used


class RequestObserver:
    """Counts what becomes of one request. `counts_gaps`: the times between tokens, too, as they are seen here."""

    def __init__(self, figures: Figures, counts_gaps: bool = True) -> None:
        self._figures = figures
        self._counts_gaps = counts_gaps
        self._last_token_time: float | None = None
        self._num_tokens: Counter[int] = Counter()  # by choice
        self._reason: str | None = None  # what ended the first choice
        self._over = False

    def saw(self, delta: RequestOutput) -> None:
        figures = self._figures
        most = 0  # new tokens of any choice
        num_gaps = 0  # one before each new token, except the first token of each choice
        for choice in delta.outputs:
            number = len(choice.token_ids)
            num_gaps += number - (number > 0 and not self._num_tokens[choice.index])
            self._num_tokens[choice.index] += number
            figures.count("vllm:generation_tokens", by=number)
            most = max(most, number)
            if choice.index == 0:
                self._reason = choice.finish_reason
        if most:
            self._saw_tokens(delta, most, num_gaps)
        if any(choice.finish_reason == "error" for choice in delta.outputs):
            self.close("error")  # also where other choices go on: the client gets none of them
        elif delta.finished:
            self.close(self._reason or "abort")
            self._saw_end(delta)

    def _saw_tokens(self, delta: RequestOutput, number: int, num_gaps: int) -> None:
        figures, times = self._figures, delta.metrics
        if self._last_token_time is None:
            self._last_token_time = times.first_token_time
            figures.observe("vllm:time_to_first_token_seconds", times.time_to_first_token or 0)
            figures.count("vllm:prompt_tokens", by=len(delta.prompt_token_ids))
            if figures.prefix_caching and delta.prompt_logprobs is None:  # a prompt that is scored is computed in full
                figures.count("vllm:prefix_cache_queries", by=len(delta.prompt_token_ids))
                figures.count("vllm:prefix_cache_hits", by=delta.num_cached_tokens)
            number -= 1
        now = times.finished_time or time.perf_counter()
        if number and self._last_token_time is not None and self._counts_gaps:
            # Of tokens that come together, each counts with its share of the time since those before.
            figures.observe("vllm:inter_token_latency_seconds", (now - self._last_token_time) / number, num_gaps)
            self._last_token_time = now

    def _saw_end(self, delta: RequestOutput) -> None:
        figures, times = self._figures, delta.metrics
        for number in self._num_tokens.values():
            figures.observe("vllm:request_generation_tokens", number)
        longest = max(self._num_tokens.values())
        figures.observe("vllm:request_max_num_generation_tokens", longest)
        figures.observe("vllm:request_prompt_tokens", len(delta.prompt_token_ids))
        figures.count("vllm:num_preemptions", by=times.num_preemptions)
        arrived, seated, first, end = (
            times.arrival_time, times.first_scheduled_time, times.first_token_time, times.finished_time
        )  # fmt: skip
        if seated is None or first is None or end is None:
            return
        for name, seconds in (
            ("e2e_request_latency", end - arrived),
            ("request_queue_time", seated - arrived),
            ("request_inference_time", end - seated),
            ("request_prefill_time", first - seated),
            ("request_decode_time", end - first),
        ):
            figures.observe(f"vllm:{name}_seconds", seconds)
        if longest > 1:
            figures.observe("vllm:request_time_per_output_token_seconds", (end - first) / (longest - 1))

    def close(self, reason: str = "abort") -> None:
        """Nothing more will come; what is not finished by now was given up."""
        if not self._over:
            self._over = True
            self._figures.count("vllm:request_success", reason)
