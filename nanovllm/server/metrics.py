"""Figures for Prometheus, in a registry of the server's own. Gauges are read when somebody asks."""

from collections import Counter as Tally
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from nanovllm.async_llm import AsyncLLM
from nanovllm.engine.scheduler import Scheduler
from nanovllm.outputs import RequestOutput
from nanovllm.stream import EngineDead

FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)  # s
EACH_TOKEN = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)  # s


class Metrics:
    def __init__(self, llm: AsyncLLM) -> None:
        self.registry = registry = CollectorRegistry()
        scheduler: Scheduler = llm.llm.engine.scheduler

        def gauge(name: str, help: str, value: Callable[[], float]) -> None:
            Gauge(f"nanovllm_{name}", help, registry=registry).set_function(value)

        def alive() -> bool:
            try:
                llm.check_health()
            except EngineDead:
                return False
            return True

        gauge("engine_alive", "1 while requests are served.", alive)
        gauge("sequences_running", "Sequences that have a seat in the batch.", lambda: llm.llm.engine.num_running)
        gauge("sequences_waiting", "Sequences that wait for one, or were preempted.", lambda: llm.num_waiting)
        gauge(
            "kv_cache_usage_ratio",
            "Share of the KV blocks that sequences hold.",
            lambda: 1 - scheduler.blocks.num_free / scheduler.num_kv_blocks,
        )

        if scheduler.proposer is not None:
            registry.register(SpeculationCounters(scheduler))

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"nanovllm_{name}", help, labels, registry=registry)

        self.ended = counter("requests", "Requests that are over, by what ended their first choice.", "reason")
        self.prompt = counter("prompt_tokens", "Tokens of the prompts of finished requests.")
        self.cached = counter(
            "prompt_tokens_cached", "Those of them found in the prefix cache: the ratio is its hit rate."
        )
        self.generated = counter("generation_tokens", "Tokens handed out, those of an answer in one piece at its end.")
        self.preemptions = counter("preemptions", "Preemptions of finished requests.")
        self.first_token = Histogram(
            "nanovllm_time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            buckets=FIRST_TOKEN,
            registry=registry,
        )
        self.each_token = Histogram(
            "nanovllm_time_per_output_token_seconds",
            "Mean time of a request's tokens after the first.",
            buckets=EACH_TOKEN,
            registry=registry,
        )

    def text(self) -> bytes:
        return generate_latest(self.registry)


class SpeculationCounters(Collector):
    """The scheduler's counts of guessed tokens, with vLLM's names. As gauges, they are read when somebody asks.

    A draft is what one step guesses for one sequence; position 0 is its first token. Divided by `num_draft_tokens`,
    `num_accepted_tokens` gives the acceptance rate.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def collect(self) -> Iterator[CounterMetricFamily]:
        stats, prefix = self.scheduler.speculation, "nanovllm_spec_decode_num"
        accepted = list(stats.accepted)  # the step loop goes on counting meanwhile
        yield CounterMetricFamily(f"{prefix}_drafts", "Drafts that were verified.", value=stats.num_steps)
        yield CounterMetricFamily(f"{prefix}_draft_tokens", "Tokens in these drafts.", value=sum(stats.proposed))
        yield CounterMetricFamily(f"{prefix}_accepted_tokens", "Those that were accepted.", value=sum(accepted))
        by_position = CounterMetricFamily(
            f"{prefix}_accepted_tokens_per_pos", "The same, by position in the draft.", labels=["position"]
        )
        for position in range(self.scheduler.max_guesses):  # also those that no draft has reached yet
            by_position.add_metric([str(position)], accepted[position] if position < len(accepted) else 0)
        yield by_position


class RequestObserver:
    """Counts what becomes of one request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._first_token_seen = False
        self._num_tokens: Tally[int] = Tally()  # by choice
        self._reason: str | None = None  # what ended the first choice
        self._over = False

    def saw(self, delta: RequestOutput) -> None:
        metrics, times = self._metrics, delta.metrics
        for choice in delta.outputs:
            self._num_tokens[choice.index] += len(choice.token_ids)
            metrics.generated.inc(len(choice.token_ids))
            if choice.index == 0:
                self._reason = choice.finish_reason
        if times.time_to_first_token is not None and not self._first_token_seen:
            self._first_token_seen = True
            metrics.first_token.observe(times.time_to_first_token)
        if any(choice.finish_reason == "error" for choice in delta.outputs):
            self.close("error")  # also where other choices go on: the client gets none of them
        elif delta.finished:
            self.close(self._reason or "abort")
            metrics.prompt.inc(len(delta.prompt_token_ids))
            metrics.cached.inc(delta.num_cached_tokens)
            metrics.preemptions.inc(times.num_preemptions)
            longest = max(self._num_tokens.values())
            if times.first_token_time is not None and times.finished_time is not None and longest > 1:
                metrics.each_token.observe((times.finished_time - times.first_token_time) / (longest - 1))

    def close(self, reason: str = "abort") -> None:
        """Nothing more will come; what is not finished by now was given up."""
        if not self._over:
            self._over = True
            self._metrics.ended.labels(reason).inc()
