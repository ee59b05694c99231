"""What /metrics says after requests that finished, failed, were given up and were preempted."""

import asyncio
import re
from collections.abc import Iterator

import httpx
import pytest

from nanovllm.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput, SpeculationStats
from nanovllm.server.metrics import EACH_TOKEN, FIRST_TOKEN, Metrics, RequestObserver
from tests.server.harness import Served, greedy, server, serving

NAME = re.compile(r"^nanovllm_(\w+?)(?:_total)?(?:\{(.*)\})? (\S+)$", flags=re.MULTILINE)


def figures(text: str) -> dict[str, float]:
    """By name, with the label's value behind a slash where there is one."""
    found = {}
    for name, label, value in NAME.findall(text):
        found[name + (f"/{label.partition('=')[2].strip(chr(34))}" if label else "")] = float(value)
    return found


@pytest.fixture(scope="module")
def tight() -> Iterator[Served]:
    """A pool in which four requests do not fit at once."""
    with server(num_kv_blocks=10, max_model_len=128) as running:
        yield running


def test_the_figures_are_the_sums_of_what_clients_were_told(tight: Served) -> None:
    prompt, body = [7] * 20, {"max_tokens": 40, "ignore_eos": True, "seed": 1, "prompt": [7] * 20}

    async def main() -> tuple[list[httpx.Response], dict[str, float]]:
        async with httpx.AsyncClient(base_url=tight.url, timeout=60) as http:
            jobs = [http.post("/v1/completions", json=body | {"stream": i % 2 == 1}) for i in range(4)]
            answers = await asyncio.gather(*jobs)
            return answers, figures((await http.get("/metrics")).text)

    answers, found = asyncio.run(main())
    cached = [a.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers[::2]]
    assert found["requests/length"] == 4 and "requests/abort" not in found
    assert found["generation_tokens"] == 4 * 40 and found["prompt_tokens"] == 4 * len(prompt)
    assert sum(cached) <= found["prompt_tokens_cached"] <= 4 * 16
    assert found["preemptions"] > 0
    assert found["sequences_running"] == found["sequences_waiting"] == found["kv_cache_usage_ratio"] == 0
    for name, buckets in ("time_to_first_token_seconds", FIRST_TOKEN), ("time_per_output_token_seconds", EACH_TOKEN):
        counts = [found[f"{name}_bucket/{float(bound)}"] for bound in buckets]
        assert counts == sorted(counts) and found[f"{name}_bucket/+Inf"] == found[f"{name}_count"] == 4
        assert 0 < found[f"{name}_sum"] < 4 * 60


def test_guesses_are_counted_with_vllms_names() -> None:
    async def main() -> None:
        async with serving(speculative={"method": "ngram", "k": 3, "n": 1}) as llm:
            metrics = Metrics(llm)

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
            metrics = Metrics(llm)
            observer = RequestObserver(metrics)
            for delta in deltas:
                observer.saw(delta)
            observer.close()
            observer.close()
            found = figures(metrics.text().decode())
            counted = {name: value for name, value in found.items() if name.startswith("requests/")}
            assert counted == {f"requests/{expected}": 1}
            whole = expected in ("stop", "length")
            assert found["preemptions"] == 2 * whole and found["prompt_tokens"] == 3 * whole
            assert found["time_per_output_token_seconds_count"] == found["time_to_first_token_seconds_count"] * whole

    asyncio.run(main())
