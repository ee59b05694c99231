"""What came of a simulation: counted while it runs, in constant memory, and told as a table or as JSON."""

from dataclasses import dataclass
from itertools import zip_longest
from math import isfinite, nan
from typing import Any

from nanovllm.simulate.histogram import Histogram
from nanovllm.simulate.replica import Job, Replica

PERCENTILES = (50, 90, 99)
MOST_GROWTH = 0.01  # of `Timeline.growth`: above this, the queue grows without end


@dataclass(slots=True)
class Bin:
    """Some time of a fleet."""

    arrivals: int = 0
    most_open: int = 0  # queries that were not over
    replicas: int = 0  # that served, at the last arrival
    finished: int = 0  # of the queries that arrived, those that have their answer
    first_token: float = 0.0  # sum of their times to the first token, in seconds

    def __add__(self, later: "Bin") -> "Bin":
        return Bin(
            self.arrivals + later.arrivals,
            max(self.most_open, later.most_open),
            max(self.replicas, later.replicas),
            self.finished + later.finished,
            self.first_token + later.first_token,
        )


class Timeline:
    """A fleet over time, in at most `MOST` bins: where they do not suffice, they become twice as wide."""

    MOST = 400

    def __init__(self) -> None:
        self.width = 1.0  # s
        self.bins: list[Bin] = []

    def add(self, time: float, num_open: int, num_replicas: int) -> None:
        """A query has arrived."""
        while time >= self.MOST * self.width:
            pairs = zip_longest(self.bins[::2], self.bins[1::2], fillvalue=Bin())
            self.bins = [a + b for a, b in pairs]
            self.width *= 2
        while len(self.bins) <= time / self.width:
            self.bins.append(Bin(replicas=num_replicas))
        bin = self.bins[int(time / self.width)]
        bin.arrivals += 1
        bin.most_open = max(bin.most_open, num_open)
        bin.replicas = num_replicas

    def finished(self, time: float, first_token: float) -> None:
        """A query that arrived at `time` has its answer, and had its first token after so many seconds."""
        bin = self.bins[int(time / self.width)]
        bin.finished += 1
        bin.first_token += first_token

    @property
    def growth(self) -> float:
        """Seconds by which the time to the first token grows per second of arrivals: the slope of a least-squares line.

        In a steady state this is near 0, and with p% more load than can be served about p / 100.
        """
        bins = [((i + 0.5) * self.width, bin) for i, bin in enumerate(self.bins) if bin.finished]
        number = sum(bin.finished for _, bin in bins) or nan
        middle = sum(time * bin.finished for time, bin in bins) / number
        spread = sum(bin.finished * (time - middle) ** 2 for time, bin in bins)
        return sum(bin.first_token * (time - middle) for time, bin in bins) / spread if spread else 0.0


class Statistics:
    """Sums and histograms of a fleet. Times are in seconds.

    target_first, target_gap: a query counts for the goodput if its first token came in time, and if the mean time
    between its later tokens was no longer than that (Zhong et al., DistServe, OSDI 2024). None: any time is good.
    """

    def __init__(self, target_first: float | None = None, target_gap: float | None = None) -> None:
        self.target_first = target_first
        self.target_gap = target_gap
        # Queries. Each one that was sent ends in one of three ways: finished, refused, or too long.
        self.num_sent = 0
        self.num_finished = 0
        self.num_refused = 0  # for good
        self.num_too_long = 0
        self.num_cut_short = 0  # finished with fewer tokens than asked for, at max_model_len
        self.num_retries = 0  # sent again after a refusal
        self.num_resent = 0  # sent again after a replica's death
        self.num_good = 0
        # Tokens
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0  # of those, found in the prefix cache
        self.num_output_tokens = 0
        self.num_lost_tokens = 0  # that came out before a replica died
        # Times of the queries that were finished, from when they were first sent
        self.first_token = Histogram()
        self.gap = Histogram()  # between two deliveries of tokens to one client; of all queries
        self.token = Histogram()  # mean time per output token after the first, of each query
        self.whole = Histogram()
        self.timeline = Timeline()
        # Replicas
        self.seconds = 0.0  # from the start until the last query was over
        self.replica_seconds = 0.0  # start-up included
        self.busy_seconds = 0.0  # of their devices
        self.block_seconds = 0.0
        self.pool_block_seconds = 0.0
        self.largest_occupancy = 0.0
        self.num_preemptions = 0
        self.num_steps = 0
        self.most_replicas = 0
        self.num_deaths = 0
        self.longest_router_queue = 0
        self.queries_by_replica: dict[int, int] = {}

    def finished(self, job: Job) -> None:
        assert job.first_token_time is not None
        query = job.query
        first, num_tokens = job.first_token_time - query.time, job.num_delivered
        self.num_finished += 1
        self.num_cut_short += num_tokens < query.max_tokens
        self.num_prompt_tokens += len(query.prompt)
        self.num_cached_tokens += job.seq.num_cached_tokens
        self.num_output_tokens += num_tokens
        self.num_preemptions += job.seq.num_preemptions
        self.first_token.add(first)
        self.timeline.finished(query.time, first)
        self.whole.add(job.finished_time - query.time)
        good = self.target_first is None or first <= self.target_first
        if num_tokens > 1:
            per_token = (job.finished_time - job.first_token_time) / (num_tokens - 1)
            self.token.add(per_token)
            good = good and (self.target_gap is None or per_token <= self.target_gap)
        self.num_good += good

    def retired(self, replica: Replica, seconds: float) -> None:
        """A replica that was there for so long is gone, or the simulation is over."""
        num_blocks = replica.config.num_kv_blocks or 1
        self.replica_seconds += seconds
        self.busy_seconds += replica.executor.busy_seconds
        self.block_seconds += replica.block_seconds
        self.pool_block_seconds += seconds * num_blocks
        self.largest_occupancy = max(self.largest_occupancy, replica.most_blocks / num_blocks)
        self.num_steps += replica.executor.num_steps
        self.queries_by_replica[replica.number] = replica.num_routed

    def report(self, ranks: int = 1) -> dict[str, Any]:
        """All of it as plain numbers, for JSON; None where there is nothing to tell. `ranks`: GPUs of a replica."""
        seconds, sent = self.seconds or nan, self.num_sent or nan
        return {
            "queries": {
                "sent": self.num_sent,
                "finished": self.num_finished,
                "refused": self.num_refused,
                "too_long": self.num_too_long,
                "cut_short": self.num_cut_short,
                "retries": self.num_retries,
                "resent_after_death": self.num_resent,
            },
            "seconds": self.seconds,
            "queries_per_second": number(self.num_finished / seconds),
            "goodput": {
                "target_first_seconds": self.target_first,
                "target_gap_seconds": self.target_gap,
                "queries_per_second": number(self.num_good / seconds),
                "share": number(self.num_good / sent),
            },
            "tokens": {
                "prompt": self.num_prompt_tokens,
                "output": self.num_output_tokens,
                "lost": self.num_lost_tokens,
                "output_per_second": number(self.num_output_tokens / seconds),
                "cached_share": number(self.num_cached_tokens / (self.num_prompt_tokens or nan)),
            },
            "first_token_seconds": summary(self.first_token),
            "first_token_growth": self.timeline.growth,
            "gap_seconds": summary(self.gap),
            "token_seconds": summary(self.token),
            "whole_seconds": summary(self.whole),
            "replicas": {
                "mean": number(self.replica_seconds / seconds),
                "most": self.most_replicas,
                "deaths": self.num_deaths,
                "gpu_hours": self.replica_seconds * ranks / 3600,
                "busy_share": number(self.busy_seconds / (self.replica_seconds or nan)),
                "mean_kv_occupancy": number(self.block_seconds / (self.pool_block_seconds or nan)),
                "largest_kv_occupancy": self.largest_occupancy,
                "preemptions": self.num_preemptions,
                "steps": self.num_steps,
                "tokens_per_step": number(self.num_output_tokens / (self.num_steps or nan)),
                "longest_router_queue": self.longest_router_queue,
                "queries": [self.queries_by_replica[n] for n in sorted(self.queries_by_replica)],
            },
        }


def number(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return value if isfinite(value) else None


def summary(times: Histogram) -> dict[str, float | None]:
    found = {f"p{p}": number(times.percentile(p)) for p in PERCENTILES}
    return {"mean": number(times.mean), **found, "largest": number(times.largest if times.num_values else nan)}


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    queries, tokens, replicas, good = (report[name] for name in ("queries", "tokens", "replicas", "goodput"))
    lines = [
        f"queries      {queries['finished']:,} of {queries['sent']:,} finished in {report['seconds']:,.1f} s, "
        f"{queries['refused']:,} refused, {queries['too_long']:,} too long, {queries['cut_short']:,} cut short; "
        f"{queries['retries']:,} retries, {queries['resent_after_death']:,} sent again after a death",
        f"throughput   {said(report['queries_per_second'])} queries/s, {said(tokens['output_per_second'], 0)} output "
        f"tokens/s; {percent(tokens['cached_share'])} of prompt tokens cached",
        f"goodput      {said(good['queries_per_second'])} queries/s, {percent(good['share'])} of all: {targets(good)}",
        f"replicas     {said(replicas['mean'], 1)} on average, {replicas['most']} at most, {replicas['deaths']} died, "
        f"{replicas['gpu_hours']:.2f} GPU hours; devices busy {percent(replicas['busy_share'])}; "
        f"{said(replicas['tokens_per_step'], 1)} tokens per step",
        f"KV blocks    {percent(replicas['mean_kv_occupancy'])} in use on average, "
        f"{percent(replicas['largest_kv_occupancy'])} at most; {replicas['preemptions']:,} preemptions",
        "",
        f"{'milliseconds':<24}{'mean':>10}" + "".join(f"{f'p{p}':>10}" for p in PERCENTILES) + f"{'largest':>10}",
    ]
    rows = {
        "first token": "first_token_seconds",
        "gap between tokens": "gap_seconds",
        "per token, by query": "token_seconds",
        "whole answer": "whole_seconds",
    }
    for name, key in rows.items():
        cells = "".join(f"{said(None if v is None else 1e3 * v, 1):>10}" for v in report[key].values())
        lines.append(f"{name:<24}{cells}")
    if (growth := report["first_token_growth"]) > MOST_GROWTH:
        lines += ["", f"no steady state: the time to the first token grew by {1e3 * growth:.0f} ms per second"]
    return "\n".join(lines)


def targets(goodput: dict[str, Any]) -> str:
    first, gap = goodput["target_first_seconds"], goodput["target_gap_seconds"]
    said = [] if first is None else [f"first token within {1e3 * first:g} ms"]
    said += [] if gap is None else [f"{1e3 * gap:g} ms per token"]
    return ", ".join(said) or "finished, with no target set"


def said(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"
