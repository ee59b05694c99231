"""The engine behind the process border: what arrives is what `LLM.generate` gives, however it was merged on the way."""

import asyncio
import threading
from array import array
from dataclasses import fields
from typing import Any

import pytest
import zmq

from nanovllm import SamplingParams
from nanovllm.admission import NeverFits, QueueFull
from nanovllm.outputs import RequestMetrics
from nanovllm.sampling.logprobs import RowLogprobs
from nanovllm.sampling_params import RequestOutputKind
from nanovllm.server import messages
from nanovllm.server.client import EngineClient
from nanovllm.server.engine_process import EngineServer
from nanovllm.server.messages import Abort, Add, End, Logprobs, Stop
from nanovllm.server.outbox import WINDOW, Outbox
from nanovllm.server.wires import Wires
from nanovllm.stream import EngineDead
from nanovllm.structured_outputs import StructuredOutputsParams
from tests.server.pair import figures, one, pair, several, slow, whole
from tests.server.pure import WORDS, PureLLM

STORY = {"prompt": "Nell the fox had a red kite."}
STOPS = ["d t", " shut"]
FINAL = RequestOutputKind.FINAL_ONLY


# --- messages ---------------------------------------------------------------------------------------------------------

OTHER: dict[str, Any] = {
    "n": 3, "temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.25, "repetition_penalty": 1.5,
    "presence_penalty": -0.5, "frequency_penalty": 0.125, "seed": 2**63 - 1, "stop": ("a", "\n\U0001f600"),
    "stop_token_ids": (5, 2**31), "ignore_eos": True, "max_tokens": None, "min_tokens": 3, "logprobs": 0,
    "skip_special_tokens": False, "include_stop_str_in_output": True, "output_kind": FINAL,
    "prompt_logprobs": 2, "logit_bias": {7: -1.5}, "bad_words": ("a", "b c"), "allowed_token_ids": (5, 9),
}  # fmt: skip


def test_sampling_parameters_cross_the_border_as_they_are() -> None:
    for field in fields(SamplingParams):
        if field.name in OTHER:  # a field that is new is tested by its own tests; all fields are sent
            changed = SamplingParams(**{"max_tokens": 64, field.name: OTHER[field.name]})
            assert changed != SamplingParams()
            arrived = messages.decode_params(messages.encode_params(changed))
            assert arrived == changed and type(getattr(arrived, field.name)) is type(getattr(changed, field.name))
    everything = SamplingParams(**OTHER).changed(bad_words_ids=((1, 2), (3,)))
    assert messages.decode_params(messages.encode_params(everything)) == everything


@pytest.mark.parametrize(
    "given", [{"json": {"type": "object"}}, {"choice": ["a", "b"]}, {"json_object": True}], ids=str
)
def test_structured_outputs_cross_the_border(given: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**given, disable_any_whitespace=True))
    assert messages.decode_params(messages.encode_params(params)) == params


def test_choices_may_end_in_one_step() -> None:
    async def main() -> None:
        async with pair(PureLLM()) as (server, [client]):
            choices, _ = await whole(await one(client, {"prompt": "Once"}, SamplingParams(n=3, max_tokens=2)))
            assert [len(choice.token_ids) for choice in choices] == [2, 2, 2] and not server._served

    asyncio.run(main())


def test_a_prompt_that_is_aborted_while_grammars_are_compiled_is_not_queued() -> None:
    """The other prompt of the same message is. An API process that ends aborts its own."""
    compiling = threading.Event()

    def compile(params: SamplingParams) -> None:
        assert compiling.wait(20)

    async def main() -> None:
        llm = PureLLM()
        llm.engine.compile = compile  # type: ignore[method-assign]
        async with pair(llm, num_clients=2) as (server, [lost, client]):
            params = SamplingParams(max_tokens=2, structured_outputs=StructuredOutputsParams(regex="[a-z]*"))
            _kept = lost.submit([lost.check(STORY, params)])
            await lost.scrape()  # the request has arrived
            client._send(messages.Gone(1))
            streams = client.submit([client.check(STORY, params) for _ in range(2)])
            await streams[0].aclose()
            found = figures(await client.scrape())  # the abort has arrived
            assert found['vllm:request_success_total{finished_reason="abort"}'] == 2
            compiling.set()
            await streams[1].accepted()
            assert [served.key for served in server._served.values()] in ([1], [])
            assert "2-0" not in llm.engine._requests
            await whole(streams[1])
            found = figures(await client.scrape())
            assert found['vllm:request_success_total{finished_reason="abort"}'] == 2 and not server._compiling
            lost._requests.clear()
            lost._choices.clear()

    asyncio.run(main())


class Panic(BaseException):
    """What a panic of Rust becomes in Python: no `Exception`."""


@pytest.mark.parametrize(
    "error", [ValueError("no grammar"), KeyError("x"), MemoryError(), RuntimeError("x"), Panic("x")]
)
def test_whatever_a_grammar_does_its_request_fails_alone(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """The client is told, and told that the fault is the server's unless the grammar is to blame."""

    def compile(params: SamplingParams) -> None:
        if params.structured_outputs is not None:
            raise error

    async def main() -> None:
        llm = PureLLM()
        llm.engine.compile = compile  # type: ignore[method-assign]
        async with pair(llm) as (server, [client]):
            params = SamplingParams(max_tokens=2, structured_outputs=StructuredOutputsParams(regex="[a-z]*"))
            [stream] = client.submit([client.check(STORY, params)])
            beside = await one(client, STORY, SamplingParams(max_tokens=2))
            kind = ValueError if isinstance(error, ValueError) else RuntimeError
            with pytest.raises(kind, match="grammar"):
                await asyncio.wait_for(stream.accepted(), 20)
            [choice], _ = await whole(beside)
            assert len(choice.token_ids) == 2 and not server._compiling and not server._served
            assert ("could not be compiled" in caplog.text) == (kind is RuntimeError)

    asyncio.run(main())


def test_log_probabilities_arrive_bit_by_bit() -> None:
    found = [{7: (-0.1, 1), 9: (-2.3456789012345678, 2)}, {}, {2**31 - 1: (-1e-300, 151936)}]
    assert Logprobs.of(3, found).entries() == found
    ids, values = array("q", [5, 5, 2**31 - 1]).tobytes(), array("f", [-0.25, -0.25, -3.5]).tobytes()
    assert Logprobs.of(3, [RowLogprobs(ids, values, 1)]).entries() == [{5: (-0.25, 1), 2**31 - 1: (-3.5, 2)}]


@pytest.mark.parametrize("raw", [b"", b"\x80\x04K\x01.", b"\x93\xa3Add\x01\x02", messages.encode([1, 2])])
def test_what_is_no_message_is_left_out(raw: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with pair(PureLLM()) as (_server, [client]):
            client._engine.send(raw)
            [choice], _ = await whole(await one(client, STORY, SamplingParams(max_tokens=2)))
            assert len(choice.token_ids) == 2 and "left out" in caplog.text

    asyncio.run(main())


class Ear:
    """A socket that keeps what it is given."""

    def __init__(self) -> None:
        self.updates: list[messages.Update] = []

    def send(self, raw: bytes, flags: int) -> None:
        assert flags == zmq.NOBLOCK
        self.updates.append(messages.decode_update(raw))


def test_what_is_not_taken_in_time_is_merged_and_never_lost() -> None:
    ear = Ear()
    outbox = Outbox(ear)  # type: ignore[arg-type]
    outbox.flush()
    assert not ear.updates, "there is nothing to say"
    for step in range(100):
        for stream in 5, 2**40:
            outbox.add(stream, [step])
            outbox.add_logprobs(stream, [{step: (-float(step), 1)}])
        outbox.metrics[5] = RequestMetrics(float(step))
        outbox.flush()
    assert len(ear.updates) == WINDOW and outbox.num_merged == 2 * (100 - WINDOW - 1)
    outbox.ends.append(End(5, "length", None))
    outbox.num_travelling -= 1
    outbox.flush()
    outbox.flush()
    assert len(ear.updates) == WINDOW + 1 and not outbox.news and not outbox.tokens
    for stream in 5, 2**40:
        assert [i for update in ear.updates for i in dict(update.deltas())[stream]] == list(range(100))
        entries = [
            e for update in ear.updates for found in update.logprobs if found.stream == stream for e in found.entries()
        ]
        assert entries == [{step: (-float(step), 1)} for step in range(100)]
    assert ear.updates[-1].ends == [End(5, "length", None)] and ear.updates[-1].metrics == [(5, RequestMetrics(99.0))]


# --- the same answers -------------------------------------------------------------------------------------------------


# What can end an output, and everything that is said of one.
CASES: list[dict[str, Any]] = [
    {"max_tokens": 30, "ignore_eos": True},
    {"max_tokens": 200, "logprobs": 3, "seed": 3},
    {"max_tokens": 200, "stop": STOPS, "seed": 1},
    {"max_tokens": 200, "stop": STOPS, "include_stop_str_in_output": True, "logprobs": 2, "seed": 2},
    {"max_tokens": 200, "stop": STOPS, "min_tokens": 40, "seed": 4},
    {"max_tokens": 200, "stop": ["never seen"], "ignore_eos": True},
    {"max_tokens": 120, "n": 3, "seed": 5, "stop": STOPS[:1], "logprobs": 0, "ignore_eos": True},
    {"max_tokens": 120, "n": 2, "seed": 7},
    {"max_tokens": 40, "stop_token_ids": WORDS[:2], "stop": STOPS, "include_stop_str_in_output": True, "seed": 8},
    {"max_tokens": 40, "ignore_eos": True, "skip_special_tokens": False, "logprobs": 1},
    {"max_tokens": 40, "stop": ["<|endoftext|>"], "ignore_eos": True, "seed": 9},
]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize(("num_clients", "behind"), [(1, 0), (3, 0.01)], ids=["alone", "three, merged"])
def test_text_ids_log_probabilities_and_ends_are_those_of_offline(
    kind: RequestOutputKind, num_clients: int, behind: float
) -> None:
    common: dict[str, Any] = {"output_kind": kind}
    params = [SamplingParams(**common, temperature=float("seed" in case), **case) for case in CASES]
    expected = PureLLM(text=True).generate(STORY["prompt"], params)
    ends = [(choice.finish_reason, type(choice.stop_reason)) for output in expected for choice in output.outputs]
    for end in ("stop", str), ("stop", int), ("stop", type(None)), ("length", type(None)):
        assert end in ends, "the cases do not show it"

    async def main() -> None:
        async with pair(PureLLM(), num_clients) as (server, clients):
            for client in clients:
                slow(client, behind)
            streams = [await one(clients[i % num_clients], STORY, p) for i, p in enumerate(params)]
            answers = await asyncio.gather(*map(whole, streams))
            for (choices, num_deltas), output, case in zip(answers, expected, CASES, strict=True):
                assert choices == output.outputs, case
                assert kind is not FINAL or num_deltas == 1
            merged = sum(outbox.num_merged for outbox in server._outboxes.values())
            assert merged > 0 or not behind
            while server._served:  # the last word on a text with stop strings is on its way
                await asyncio.sleep(0.01)
            scrapes = [figures(await client.scrape()) for client in clients]
            found = scrapes[0]
            assert all(scrape == found for scrape in scrapes)
            for reason in "stop", "length":
                first = sum(output.outputs[0].finish_reason == reason for output in expected)
                assert found[f'vllm:request_success_total{{finished_reason="{reason}"}}'] == first
            num_tokens = sum(len(choice.token_ids) for output in expected for choice in output.outputs)
            assert found["vllm:generation_tokens_total"] == num_tokens, "tokens behind a stop do not count"

    asyncio.run(main())


def test_a_stop_string_ends_its_choice_soon_and_no_other() -> None:
    async def main() -> None:
        async with pair(PureLLM(seconds=0.002)) as (server, [client]):
            params = SamplingParams(n=3, seed=5, max_tokens=230, stop=STOPS[1:], ignore_eos=True)
            choices, _ = await whole(await one(client, STORY, params))
            lengths = [len(choice.token_ids) for choice in choices]
            assert {choice.stop_reason for choice in choices} == {STOPS[1]} and len(set(lengths)) == 3
            assert max(lengths) < 200
            found = figures(await client.scrape())
            assert found["vllm:inter_token_latency_seconds_count"] == sum(lengths) - 3
            assert server.llm.engine.scheduler._num_steps < max(lengths) + 20, "the engine does not compute the rest"

    asyncio.run(main())


# --- limits, aborts, ends ---------------------------------------------------------------------------------------------


def test_what_cannot_run_is_refused_here_and_what_may_not_there() -> None:
    async def main() -> None:
        async with pair(PureLLM(seconds=0.002), num_clients=2, max_queue=1) as (_server, [client, other]):
            for prompt, params, error in (
                ({"prompt_token_ids": []}, SamplingParams(), ValueError),
                ({"prompt_token_ids": [5000]}, SamplingParams(), ValueError),
                ({"prompt_token_ids": [1] * 256}, SamplingParams(), ValueError),
                ({"prompt": "\ud800"}, SamplingParams(), ValueError),
                ({"prompt": STORY, "x": 1}, SamplingParams(), TypeError),
                ({"prompt": "x"}, SamplingParams(stop_token_ids=[5000]), ValueError),
            ):
                with pytest.raises(error):
                    await several(client, [STORY, prompt], params)
            endless = SamplingParams(max_tokens=200, ignore_eos=True)
            running = await one(client, STORY, endless.changed(n=8))
            waiting = await one(other, STORY, endless)
            with pytest.raises(QueueFull, match="max_queue=1"):
                await one(client, STORY, endless)
            with pytest.raises(NeverFits, match="max_num_seqs=8"):
                await several(client, [STORY] * 10, endless)
            assert figures(await other.scrape())["vllm:num_requests_waiting"] == 1
            await running.aclose()
            await waiting.aclose()
            await other.scrape()  # its abort has arrived; two clients' messages are in no order
            await whole(await one(client, STORY, SamplingParams(max_tokens=1)))

    asyncio.run(main())


def test_closing_and_dropping_a_stream_abort_its_request() -> None:
    async def main() -> None:
        async with pair(PureLLM(seconds=0.002)) as (server, [client]):
            params = SamplingParams(max_tokens=230, ignore_eos=True, stop=["never seen"])
            closed, dropped = await one(client, STORY, params), await one(client, STORY, params)
            await closed.__anext__()
            await closed.aclose()
            with pytest.raises(StopAsyncIteration):
                await closed.__anext__()
            del dropped
            reading = asyncio.create_task(whole(await one(client, STORY, params)))
            await asyncio.sleep(0.02)
            reading.cancel()
            await asyncio.wait([reading])
            found = figures(await client.scrape())
            assert found['vllm:request_success_total{finished_reason="abort"}'] == 3 and not server._served

    asyncio.run(main())


def test_when_an_api_process_is_gone_its_requests_end_and_what_was_on_its_way_is_nobodys() -> None:
    async def main() -> None:
        async with pair(PureLLM(seconds=0.002), num_clients=2) as (server, [lost, other]):
            endless = SamplingParams(max_tokens=230, ignore_eos=True)
            stream, staying = await one(lost, STORY, endless), await one(other, STORY, endless)
            await stream.__anext__()
            other._send(messages.Gone(1))
            await other.scrape()
            assert len(server._served) == 1
            prompt = messages.Prompt(99, messages.pack("i", [1]), messages.encode_params(endless), None)
            for late in Add(1, [prompt], 0, 0.0), Abort(1, 0), Stop(1, 0, 0, 1):
                lost._send(late)
            found = figures(await other.scrape())
            assert found['vllm:request_success_total{finished_reason="abort"}'] == 1 and len(server._served) == 1
            assert len((await whole(staying))[0][0].token_ids) == 230
            lost._requests.clear()
            lost._choices.clear()

    asyncio.run(main())


class Broken(PureLLM):
    """Fails once it has two requests."""

    def __init__(self) -> None:
        super().__init__(seconds=0.002)
        self.advance = self.engine.advance
        self.engine.advance = self.fail  # type: ignore[method-assign]

    def fail(self) -> Any:
        if len(self.engine._requests) == 2:
            raise ArithmeticError("the planted fault")
        return self.advance()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_a_step_fails_everybody_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        with pytest.raises(EngineDead):
            async with pair(Broken(), num_clients=2) as (_server, clients):
                params = SamplingParams(max_tokens=200, ignore_eos=True)
                for client in clients:
                    await client.scrape()  # the engine knows it
                for reading in [asyncio.create_task(whole(await one(client, STORY, params))) for client in clients]:
                    with pytest.raises(EngineDead, match="planted fault"):
                        await reading
                for client in clients:
                    with pytest.raises(EngineDead):
                        client.check_health()
                    with pytest.raises(EngineDead):
                        await several(client, [STORY], params)
                await clients[0].scrape()

    asyncio.run(main())
    assert "planted fault" in caplog.text


def test_without_unix_sockets_strangers_are_not_heard() -> None:
    async def main() -> None:
        keys = zmq.curve_keypair()
        async with pair(PureLLM(), used=Wires(None, *keys)) as (server, [client]):
            assert server.address.startswith("tcp://127.0.0.1:")
            stranger, sockets = zmq.Context(), []
            for used in Wires(None, *zmq.curve_keypair()), None:
                socket = stranger.socket(zmq.PUSH) if used is None else used.connect(stranger, server.address)
                if used is None:
                    socket.connect(server.address)
                socket.linger = 0
                sockets.append(socket)  # one that is forgotten is closed, and what it was sending is lost
                socket.send(messages.encode(messages.Quit()))
            await asyncio.sleep(0.1)
            [choice], _ = await whole(await one(client, STORY, SamplingParams(max_tokens=2)))
            assert len(choice.token_ids) == 2
            stranger.destroy(linger=0)

    asyncio.run(main())


def test_the_client_is_what_the_application_needs() -> None:
    from nanovllm.server.interface import Engine, Meters

    def needs(engine: Engine, meters: Meters) -> None: ...

    def check(client: EngineClient, server: EngineServer) -> None:  # for mypy
        needs(client, client)
        needs(client, server.metrics)
