"""The engine's process: takes requests from the API processes, runs steps, and sends each process one message per step.

Limits, the queue, aborts, priorities and all counters are here, so that it does not matter which API process serves a
client. Text is not here: tokenizing, detokenizing and stop strings are the API processes' work.
"""

import argparse
import gc
import logging
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import msgspec
import zmq

from nanovllm.admission import NeverFits, QueueFull, check_queue
from nanovllm.config import EngineConfig
from nanovllm.engine.engine import LLMEngine
from nanovllm.engine.grammars import Matcher
from nanovllm.engine.request import Request
from nanovllm.engine.scheduler import Committed
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.sampling_params import RequestOutputKind, SamplingParams
from nanovllm.server import messages
from nanovllm.server.messages import (
    Abort,
    Add,
    Compiled,
    Counted,
    End,
    EngineInfo,
    Failed,
    Finished,
    Gone,
    Hello,
    Quit,
    Refused,
    Scrape,
    Stop,
    Taken,
    ToEngine,
)
from nanovllm.server.metrics import Figures, Metrics, RequestObserver
from nanovllm.server.outbox import Outbox
from nanovllm.server.wires import Wires, obey_the_parent

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 256  # messages between two steps: a flood of requests does not delay those that run


class ServedLLM(Protocol):
    """The part of `LLM` that the server uses."""

    @property
    def engine(self) -> LLMEngine: ...
    @property
    def path(self) -> Path: ...
    @property
    def config(self) -> EngineConfig: ...
    @property
    def sampling_defaults(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Served:
    """A request whose reader, an API process, still waits for news."""

    sender: int
    key: int
    outbox: Outbox
    observer: RequestObserver
    whole: bool  # the reader gets nothing before the end
    has_stops: bool  # it has stop strings, so only the reader knows where it ends
    num_counted: list[int]  # tokens that the observer has seen, of each choice
    last_token_times: list[float]  # of each choice, in seconds of time.perf_counter(); 0 before the first
    request: Request | None = None  # known once there are the first news

    @classmethod
    def of(cls, sender: int, key: int, outbox: Outbox, params: SamplingParams, figures: Figures) -> "Served":
        has_stops, final = bool(params.stop), params.output_kind is RequestOutputKind.FINAL_ONLY
        # With stop strings the reader decides which tokens count, so only the mean time between tokens is known.
        observer = RequestObserver(figures, counts_gaps=has_stops)
        whole = final and not has_stops and params.logprobs is None
        return cls(sender, key, outbox, observer, whole, has_stops, [0] * params.n, [0.0] * params.n)

    def count(self) -> None:
        """Tell the observer what it has not seen: when `/metrics` is read and when a request ends, not per step."""
        request = self.request
        if request is None:
            return
        outputs = []
        for i, choice in enumerate(request.choices):
            seq, before = choice.seq, self.num_counted[i]
            new = seq.token_ids[seq.num_prompt_tokens + before :]
            self.num_counted[i] = before + len(new)
            outputs.append(CompletionOutput(i, "", new, finish_reason=seq.finish_reason))
        scored: list[Any] | None = None if request.params.prompt_logprobs is None else []  # whether the prompt was
        whole = request.prompt_token_ids, scored, outputs, request.finished, request.metrics()
        self.observer.saw(RequestOutput(request.request_id, None, *whole))


class EngineServer:
    """The step loop, with the messages that it takes in and sends out."""

    def __init__(self, llm: ServedLLM, wires: Wires, model_name: str, max_queue: int | None = None) -> None:
        self.llm = llm
        self.max_queue = max_queue
        self.model_name = model_name
        self.metrics = Metrics(self, model_name)
        self.figures = self.metrics.figures
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wires = wires
        self._inbox, self.address = wires.listen(self._context, "engine")
        self._outboxes: dict[int, Outbox] = {}  # by the number of the API process
        self._gone: set[int] = set()
        self._served: dict[str, Served] = {}  # by the engine's request id
        self._serving = True
        # Requests whose grammars are being compiled, and those whose grammars are compiled
        self._compilers = ThreadPoolExecutor(2, "nanovllm-grammars")
        self._compiling: set[str] = set()
        self._compiled: SimpleQueue[tuple[Add, list[SamplingParams], list[Matcher | None] | Exception]] = SimpleQueue()

    @property
    def info(self) -> EngineInfo:
        llm = self.llm
        config = {name: str(value) if isinstance(value, Path) else value for name, value in vars(llm.config).items()}
        vocabulary = llm.engine.vocab_size, sorted(llm.engine.eos_token_ids)
        return EngineInfo(self.address, str(llm.path), self.model_name, config, *vocabulary, llm.sampling_defaults)

    @property
    def num_waiting(self) -> int:
        return self.llm.engine.num_waiting

    def check_health(self) -> None:
        """Never raises: a process that can be asked is serving."""

    def run(self) -> None:
        """Run until a `Quit`. An error of a step is sent to every API process, and then raised."""
        try:
            self._loop()
        except BaseException as error:
            logger.exception("the step loop has ended, and no request can be served any more")
            for outbox in self._outboxes.values():
                outbox.failure, outbox.news = f"the step loop has ended: {error!r}", True
                outbox.flush()
            raise
        finally:
            self._compilers.shutdown(cancel_futures=True)
            self._context.destroy()
            self.llm.close()

    def _loop(self) -> None:
        engine = self.llm.engine
        while self._serving:
            if not engine.has_unfinished():
                self._inbox.poll()  # an idle engine sleeps here
            self._take_in()
            if engine.has_unfinished():
                self._hand_out(*engine.advance())
            for outbox in self._outboxes.values():
                outbox.flush()

    def _hand_out(self, committed: list[Committed], changed: dict[str, Request]) -> None:
        now = time.perf_counter()
        over: dict[str, Served] = {}
        # How many streams have the same time of their token before, and the same number of new tokens
        gaps: dict[tuple[float, int], int] = {}
        for seq, token_ids, logprobs in reversed(committed):  # newest first: a first token waits for nobody else
            served = self._served[seq.request_id]
            if not served.has_stops:
                if last := served.last_token_times[seq.choice]:
                    gap = last, len(token_ids)
                    gaps[gap] = gaps.get(gap, 0) + 1
                served.last_token_times[seq.choice] = now
            if served.request is None:
                served.request = request = changed[seq.request_id]
                served.outbox.metrics[served.key] = request.metrics()
                if request.params.prompt_logprobs is not None:  # complete: the first choice is ahead of the others
                    served.outbox.prompt_logprobs[served.key] = request.choices[0].seq.prompt_logprobs
            if served.whole:
                if seq.finish_reason is None:
                    continue
                token_ids = seq.token_ids[seq.num_prompt_tokens :]
            stream = served.key + seq.choice
            served.outbox.add(stream, token_ids)
            if logprobs is not None:
                served.outbox.add_logprobs(stream, logprobs)
            if seq.finish_reason is not None:
                served.outbox.ends.append(End(stream, seq.finish_reason, seq.stop_reason))
                if seq.finish_reason == "error":
                    served.count()
                if served.request.finished:  # several of its choices may end in this step
                    over[seq.request_id] = served
        for request_id, served in over.items():
            assert served.request is not None
            served.outbox.metrics[served.key] = served.request.metrics()
            if not served.has_stops:
                served.count()
                del self._served[request_id]
        for (last, number), times in gaps.items():  # mostly one: nearly all streams had a token in the step before
            if number:
                self.figures.observe("vllm:inter_token_latency_seconds", (now - last) / number, number * times)

    # --- what comes in ---

    def _take_in(self) -> None:
        for _ in range(MOST_AT_ONCE):
            try:
                raw = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message: ToEngine = messages.decode_to_engine(raw)
            except msgspec.MsgspecError as error:
                logger.warning("a message that is none was left out: %s", error)
                continue
            self._handle(message)

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Compiled():
                self._take_compiled()
            case Quit():
                self._serving = False
            case Hello(sender, address) if sender not in self._gone:
                self._outboxes[sender] = Outbox(self._wires.connect(self._context, address))
            case Gone(sender):
                self._forget(sender)
            case _ if message.sender not in self._outboxes:
                pass  # the sender is gone, and this message was on its way
            case Add():
                self._add(message)
            case Taken(sender):
                self._outboxes[sender].num_travelling -= 1
            case Counted(_, name, labels):
                self.figures.count(name, *labels)
            case Scrape(sender, number):
                self._scrape(self._outboxes[sender], number)
            case Abort(sender, key):
                self._abort(f"{sender}-{key}")
            case Stop(sender, key, choice, num_tokens):
                self._stop(f"{sender}-{key}", choice, num_tokens)
            case Finished(sender, key):
                if served := self._served.pop(f"{sender}-{key}", None):
                    served.count()

    def _add(self, message: Add) -> None:
        """Queue all prompts, or none. Grammars are compiled first, in a thread, so that no other request must wait."""
        all_params = [messages.decode_params(prompt.params) for prompt in message.prompts]
        if any(params.structured_outputs for params in all_params):
            self._compiling |= {f"{message.sender}-{prompt.key}" for prompt in message.prompts}
            self._compilers.submit(self._compile, message, all_params)
        else:
            self._queue(message, all_params, [None] * len(all_params))

    def _compile(self, message: Add, all_params: list[SamplingParams]) -> None:
        """Compile the grammars of an `Add`. Runs in a thread of `_compilers`."""
        found: list[Matcher | None] | Exception
        try:
            found = [self.llm.engine.compile(params) for params in all_params]
        except ValueError as error:  # hardly possible: the API process has compiled the same grammar
            found = error
        except BaseException as error:  # in a thread nobody else would hear of it; a panic of Rust is no Exception
            logger.exception("a grammar could not be compiled; its request fails alone")
            found = RuntimeError(f"the grammar could not be compiled: {error!r:.500}")
        self._compiled.put((message, all_params, found))
        with self._wires.connect(self._context, self.address) as socket:
            socket.send(messages.encode(Compiled()))

    def _take_compiled(self) -> None:
        message, all_params, found = self._compiled.get()
        wanted = {f"{message.sender}-{prompt.key}" for prompt in message.prompts} & self._compiling
        self._compiling -= wanted
        # What was aborted in the meantime is left out.
        kept = [i for i, prompt in enumerate(message.prompts) if f"{message.sender}-{prompt.key}" in wanted]
        if not kept or message.sender not in self._outboxes:
            return
        message = Add(message.sender, [message.prompts[i] for i in kept], message.priority, message.arrival_time)
        if isinstance(found, Exception):
            self._refuse(message, found)
        else:
            self._queue(message, [all_params[i] for i in kept], [found[i] for i in kept])

    def _refuse(self, message: Add, error: Exception) -> None:
        kinds = NeverFits, QueueFull, TypeError, ValueError, RuntimeError  # the last is a fault of the server
        kind = next(kind.__name__ for kind in kinds if isinstance(error, kind))
        outbox = self._outboxes[message.sender]
        outbox.refused += [Refused(prompt.key, kind, str(error)) for prompt in message.prompts]
        outbox.news = True

    def _queue(self, message: Add, all_params: list[SamplingParams], matchers: Sequence[Matcher | None]) -> None:
        outbox, engine = self._outboxes[message.sender], self.llm.engine
        added: list[str] = []
        try:
            load = engine.num_waiting, engine.num_free_seats, self.llm.config.max_num_seqs
            check_queue(sum(params.n for params in all_params), *load, self.max_queue)
            for prompt, params, matcher in zip(message.prompts, all_params, matchers, strict=True):
                request_id = f"{message.sender}-{prompt.key}"
                engine.add_request(
                    request_id,
                    messages.unpack("i", prompt.token_ids),
                    params.changed(stop=()),  # there is no text here
                    message.priority,
                    prompt.cache_salt,
                    arrival_time=message.arrival_time,
                    matcher=matcher,
                )
                added.append(request_id)
        except (QueueFull, ValueError, TypeError) as error:
            for request_id in added:
                engine.abort_request(request_id)
            self._refuse(message, error)
        else:
            for prompt, params in zip(message.prompts, all_params, strict=True):
                self._served[f"{message.sender}-{prompt.key}"] = Served.of(
                    message.sender, prompt.key, outbox, params, self.figures
                )
            outbox.accepted += [prompt.key for prompt in message.prompts]
        outbox.news = True

    def _stop(self, request_id: str, choice: int, num_tokens: int) -> None:
        """End a choice as if the engine had met the stop string. By now the choice may have gone on, or have ended."""
        served = self._served.get(request_id)
        if served is None or served.request is None:
            return
        self.llm.engine.stop_choice(request_id, choice)
        seq = served.request.choices[choice].seq
        seq.finish_reason = "stop"
        del seq.token_ids[seq.num_prompt_tokens + num_tokens :]

    def _abort(self, request_id: str) -> None:
        if request_id in self._compiling:  # it has no observer yet
            self._compiling.remove(request_id)
            self.figures.count("vllm:request_success", "abort")
        served = self._served.pop(request_id, None)
        if served is None:
            return
        if served.request is None or not served.request.finished:
            served.count()
        self.llm.engine.abort_request(request_id)
        served.observer.close()

    def _scrape(self, outbox: Outbox, number: int) -> None:
        for served in self._served.values():
            if not served.has_stops:
                served.count()
        outbox.scrapes.append((number, self.metrics.text()))
        outbox.news = True

    def _forget(self, sender: int) -> None:
        """Abort all requests of an API process that has ended."""
        self._gone.add(sender)  # even if the first message of this process is still on its way
        for request_id in [id for id in (*self._compiling, *self._served) if id.startswith(f"{sender}-")]:
            self._abort(request_id)
        if outbox := self._outboxes.pop(sender, None):
            outbox.socket.close(linger=0)


def make_llm(model: str | None, config: dict[str, Any]) -> ServedLLM:
    from nanovllm import LLM  # torch, which only this process loads

    llm = LLM(model, **config)
    llm.engine.make_detokenizer = None  # text is the API processes' work; the tokenizer here is for grammars only
    return llm


def run_engine(
    wires: Wires,
    make: Callable[..., ServedLLM],
    arguments: tuple[Any, ...],
    options: argparse.Namespace,
    report: Connection,
) -> None:
    """Run the engine's process. `make(*arguments)` loads the model. `report` gets an EngineInfo, or a Failed."""
    obey_the_parent(wires, options.log_level)
    try:
        llm = make(*arguments)
    except (ValueError, TypeError, OSError) as error:
        report.send_bytes(messages.encode(Failed(type(error).__name__, str(error))))
        sys.exit(1)
    name = options.served_model_name or model_name(options.model, llm.path)
    server = EngineServer(llm, wires, name, options.max_queue)
    gc.collect()
    gc.freeze()  # a full collection would look at all that is loaded, and no token would come meanwhile
    report.send_bytes(messages.encode(server.info))
    server.run()


def model_name(model: str | None, path: Path) -> str:
    """What clients call the model: the hub id, or the last part of a directory's path, as the rest is private."""
    return model if model and not Path(model).exists() else path.resolve().name
