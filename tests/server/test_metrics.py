"""What /metrics says after requests that finished, failed, were given up and were preempted."""

import asyncio
import re
import time
from collections.abc import Iterator

import httpx
import pytest

from nanovllm.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput, SpeculationStats
from nanovllm.server.metrics import EACH_TOKEN, HISTOGRAMS, Figures, Metrics, RequestObserver
from tests.server.harness import Served, greedy, server, serving

ANSWERED = "http_requests//v1/completions/POST/200"

NAME = re.compile(r"^(?:vllm:)?([a-z:_\d]+?)(?:_total)?(?:\{(.*)\})? (\S+)$", flags=re.MULTILINE)


def figures(text: str) -> dict[str, float]:
    """By name without "vllm:", with the values of labels behind slashes. Every figure must name the model."""
    found = {}
    for name, text_of_labels, value in NAME.findall(text):
        labels = dict(re.findall(r'(\w+)="(.*?)"', text_of_labels))
        assert labels.pop("model_name") == "story" and labels.pop("engine") == "0"
        found["/".join([name, *labels.values()])] = float(value)
    return found


@pytest.fixture(scope="module")
def tight() -> Iterator[Served]:
    """A pool in which four requests do not fit at once."""
    with server(num_kv_blocks=10, max_model_len=128) as running:
        yield running


def test_the_figures_are_the_sums_of_what_clients_were_told(tight: Served) -> None:
    prompt, body = [7] * 20, {"max_tokens": 40, "ignore_eos": True, "seed": 1, "prompt": [7] * 20}

    async def main() -> dict[str, float]:
        async with httpx.AsyncClient(base_url=tight.url, timeout=60) as http:
            jobs = [http.post("/v1/completions", json=body | {"stream": i % 2 == 1}) for i in range(4)]
            await asyncio.gather(*jobs)
            deadline = time.monotonic() + 20
            while True:  # a request is counted by its status when all of its answer is sent, which may be read before
                found = figures((await http.get("/metrics")).text)
                if found.get(ANSWERED) == 4 or time.monotonic() > deadline:
                    return found
                await asyncio.sleep(0.01)

    found = asyncio.run(main())
    assert found["request_success/length"] == 4 and found["request_success/abort"] == 0
    assert found["generation_tokens"] == 4 * 40 and found["prompt_tokens"] == 4 * len(prompt)
    assert found["prefix_cache_queries"] == 4 * len(prompt) and 0 <= found["prefix_cache_hits"] <= 4 * 16
    assert found["num_preemptions"] > 0
    assert found["num_requests_running"] == found["num_requests_waiting"] == found["kv_cache_usage_perc"] == 0
    for name, (_, buckets) in HISTOGRAMS.items():
        name = name.removeprefix("vllm:")
        counts = [found[f"{name}_bucket/{float(bound)}"] for bound in buckets]
        number = 4 * 39 if name == "inter_token_latency_seconds" else 4
        assert counts == sorted(counts) and found[f"{name}_bucket/+Inf"] == found[f"{name}_count"] == number
        assert 0 < found[f"{name}_sum"] < 4 * 60
    parts = [found[f"request_{name}_time_seconds_sum"] for name in ("queue", "prefill", "decode")]
    assert sum(parts) == pytest.approx(found["e2e_request_latency_seconds_sum"])
    assert sum(parts[1:]) == pytest.approx(found["request_inference_time_seconds_sum"])
    assert found["request_generation_tokens_sum"] == 160 and found["request_prompt_tokens_sum"] == 80
    assert found[ANSWERED] == 4


def test_every_name_and_label_of_vllms_dashboard_is_there(tight: Served) -> None:
    """Those of the queries in grafana.json of vLLM's examples/observability/prometheus_grafana."""
    histograms = "e2e_request_latency_seconds inter_token_latency_seconds time_to_first_token_seconds"
    lengths = "request_prompt_tokens request_generation_tokens"
    sums = "request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds"
    wanted = [f"{name}_{part}" for name in f"{histograms} {lengths}".split() for part in ("bucket", "sum", "count")]
    wanted += [f"{name}_sum" for name in f"{sums} request_max_num_generation_tokens".split()]
    wanted += "num_requests_running num_requests_waiting kv_cache_usage_perc".split()
    wanted += ["prompt_tokens_total", "generation_tokens_total"]
    text = httpx.get(f"{tight.url}/metrics").text
    for name in wanted:
        assert re.search(rf'^vllm:{name}{{[^}}]*model_name="story"', text, flags=re.MULTILINE), name
    assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="story"} ' in text


def test_refusals_are_counted_by_their_status(tight: Served) -> None:
    before = figures(httpx.get(f"{tight.url}/metrics").text)
    for path in "/v1/completions", "/v1/nothing", "/x" * 300:
        httpx.post(f"{tight.url}{path}", json={"prompt": "a", "n": 0})
    httpx.request("BREW", f"{tight.url}/v1/models/x")
    after = figures(httpx.get(f"{tight.url}/metrics").text)
    new = {name: after[name] - before.get(name, 0) for name in after if name.startswith("http_requests/")}
    assert {name: number for name, number in new.items() if number} == {
        "http_requests//v1/completions/POST/400": 1,
        "http_requests/other/POST/404": 2,  # no path that a client makes up has a line of its own
        "http_requests//v1/models/{name:path}/other/405": 1,
        "http_requests//metrics/GET/200": 1,
    }


def test_only_what_is_looked_up_in_the_prefix_cache_counts_there() -> None:
    scored = {"prompt": [7] * 20, "max_tokens": 0, "echo": True, "logprobs": 1}
    for caching, bodies, queries in (True, [{"prompt": [7] * 20}, scored], 20), (False, [{"prompt": [7] * 20}], 0):
        with server(shadow=True, enable_prefix_caching=caching) as served:
            for body in bodies:
                assert httpx.post(f"{served.url}/v1/completions", json=body).status_code == 200
            found = figures(httpx.get(f"{served.url}/metrics").text)
            assert found["prefix_cache_queries"] == queries and found["prompt_tokens"] == 20 * len(bodies)


def test_gaps_of_all_choices_count() -> None:
    """Of three choices with 3, 2 and no tokens behind their first ones."""
    figures = Figures()
    observer = RequestObserver(figures)
    observer.saw(output(False, {0: None, 1: None}))
    rest = output(True, {0: "stop", 1: "stop", 2: "length"})
    for choice, number in zip(rest.outputs, (3, 2, 1), strict=True):
        choice.token_ids = [1] * number
    observer.saw(rest)
    assert sum(figures.histograms["vllm:inter_token_latency_seconds"][:-1]) == 5


def test_gaps_between_tokens_are_told_from_the_first_token_on() -> None:
    """Two tokens in 0.4 s behind the first of a whole answer: twice 0.2 s."""
    figures = Figures()
    whole = output(True, {0: "stop"})
    whole.outputs[0].token_ids = [1, 2, 3]
    RequestObserver(figures).saw(whole)
    numbers = figures.histograms["vllm:inter_token_latency_seconds"]
    assert numbers[EACH_TOKEN.index(0.2)] == 2 and numbers[-1] == pytest.approx(0.4)


def test_guesses_are_counted_with_vllms_names() -> None:
    async def main() -> None:
        async with serving(speculative={"method": "ngram", "k": 3, "n": 1}) as llm:
            metrics = Metrics(llm, "story")

            def spec_decode() -> dict[str, float]:
                found = figures(metrics.text().decode())
                prefix = "spec_decode_num_"
                return {name.removeprefix(prefix): found[name] for name in found if name.startswith(prefix)}

            by_position = [f"accepted_tokens_per_pos/{position}" for position in range(3)]
            assert spec_decode() == dict.fromkeys(["drafts", "draft_tokens", "accepted_tokens", *by_position], 0)
            parts: list[SpeculationStats] = []
            for length in 10, 60:
                async for delta in llm.generate({"prompt_token_ids": [1, 2, 1]}, greedy(max_tokens=length)):
                    if delta.finished and delta.metrics.speculation is not None:
                        parts.append(delta.metrics.speculation)
                total = SpeculationStats.total(parts)
                assert total is not None
                assert spec_decode() == {
                    "drafts": total.num_steps,
                    "draft_tokens": sum(total.proposed),
                    "accepted_tokens": sum(total.accepted),
                    **dict(zip(by_position, total.accepted, strict=True)),
                }
            assert 0 < spec_decode()["accepted_tokens"] < spec_decode()["draft_tokens"]

    asyncio.run(main())


def test_without_guesses_nothing_is_said_of_them(tight: Served) -> None:
    assert "spec_decode" not in httpx.get(f"{tight.url}/metrics").text


def output(finished: bool, reasons: dict[int, FinishReason | None]) -> RequestOutput:
    """With a token more for each choice in `reasons`."""
    choices = [CompletionOutput(i, "a", [1], finish_reason=reason) for i, reason in reasons.items()]
    times = RequestMetrics(0.0, 0.0, 0.1, 0.5 if finished else None, num_preemptions=2)
    return RequestOutput("a", None, [1, 2, 3], None, choices, finished, times)


@pytest.mark.parametrize(
    ("deltas", "expected"),
    [
        ([output(False, {0: None}), output(True, {0: "stop"})], "stop"),
        ([output(False, {0: "stop", 1: None}), output(True, {1: "length"})], "stop"),  # the first choice's
        ([output(False, {0: None, 1: "length"}), output(True, {0: "stop"})], "stop"),
        ([output(False, {0: None, 1: "error"})], "error"),  # the client got an error, and the other choice is given up
        ([output(False, {0: None})], "abort"),
        ([], "abort"),
    ],
)
def test_a_request_is_counted_once_by_what_ended_it(deltas: list[RequestOutput], expected: str) -> None:
    async def main() -> None:
        async with serving() as llm:
            metrics = Metrics(llm, "story")
            observer = RequestObserver(metrics.figures)
            for delta in deltas:
                observer.saw(delta)
            observer.close()
            observer.close()
            found = figures(metrics.text().decode())
            counted = {name: value for name, value in found.items() if name.startswith("request_success/") and value}
            assert counted == {f"request_success/{expected}": 1}
            whole = expected in ("stop", "length")
            assert found["num_preemptions"] == 2 * whole and found["prompt_tokens"] == 3 * bool(deltas)
            for name in "request_time_per_output_token_seconds", "e2e_request_latency_seconds":
                assert found[f"{name}_count"] == whole

    asyncio.run(main())
