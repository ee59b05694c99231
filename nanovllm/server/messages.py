"""The messages between the processes of a server: typed, in MessagePack, and never a pickle.

An API process sends the engine's process one message for each thing that happens to a request. The engine's process
sends each API process one message per step, the `Update`. An `Update` has only what is new: tokens as deltas, in
arrays, and no text.

A *stream* is one choice of a request. Each API process numbers its streams: a request has the number `key`, and its n
choices are the streams `key` to `key + n - 1`.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.msgpack import Decoder, Encoder

from nanovllm.engine.plan import TokenLogprobs
from nanovllm.outputs import FinishReason, RequestMetrics
from nanovllm.sampling_params import RequestOutputKind, SamplingParams
from nanovllm.structured_outputs import StructuredOutputsParams

# --- sampling parameters ----------------------------------------------------------------------------------------------

encode = Encoder().encode
_decode = Decoder(dict[str, Any]).decode
_DEFAULTS = SamplingParams()


def encode_params(params: SamplingParams) -> msgspec.Raw:
    """Parameters with their default are left out."""
    return msgspec.Raw(
        encode({name: value for name, value in vars(params).items() if value != getattr(_DEFAULTS, name)})
    )


def decode_params(raw: msgspec.Raw) -> SamplingParams:
    """The parameters. They are not checked again: the API process checked them when it made them."""
    values = {name: with_tuples(value) for name, value in _decode(raw).items()}
    if "structured_outputs" in values:
        values["structured_outputs"] = StructuredOutputsParams(**values["structured_outputs"])
    if "output_kind" in values:
        values["output_kind"] = RequestOutputKind(values["output_kind"])
    return SamplingParams().changed(**values)


def with_tuples(value: Any) -> Any:
    """The value, with tuples in place of lists: a tuple arrives as a list."""
    return tuple(map(with_tuples, value)) if isinstance(value, list) else value


# --- arrays -----------------------------------------------------------------------------------------------------------


def pack(kind: str, values: Iterable[Any]) -> bytes:
    """The bytes of an array of values. `kind` as in `array`: "i" is int32, "q" int64, "d" float64."""
    return array(kind, values).tobytes()


def unpack(kind: str, raw: bytes) -> list[Any]:
    values = array(kind)
    values.frombytes(raw)
    return values.tolist()


# --- to the engine ----------------------------------------------------------------------------------------------------


class FromApi(Struct, array_like=True, tag=True):
    sender: int  # the number of the API process; never used twice


class Hello(FromApi):
    """The first message of an API process: where it listens."""

    address: str


class Prompt(Struct, array_like=True):
    key: int
    token_ids: bytes  # int32
    params: msgspec.Raw  # see `encode_params`
    cache_salt: str | None


class Add(FromApi):
    """Prompts to queue: all are queued, or all are refused."""

    prompts: list[Prompt]
    priority: int
    arrival_time: float  # seconds of time.perf_counter(), which all processes of a machine share


class Compiled(Struct, array_like=True, tag=True):
    """From a thread of the engine's own process: the grammars of an `Add` are compiled."""


class Abort(FromApi):
    key: int


class Stop(FromApi):
    """A stop string was found in the text of one choice. Tokens that the engine has computed since do not count."""

    key: int
    choice: int
    num_tokens: int  # up to the token that completed the stop string


class Finished(FromApi):
    """The reader has all of a request with stop strings: no `Stop` will follow."""

    key: int


class Taken(FromApi):
    """The API process has worked through an `Update`."""


class Counted(FromApi):
    """The API process has seen something to count, such as an answer with its status."""

    name: str  # of a counter of `Metrics`
    labels: list[str]


class Scrape(FromApi):
    number: int


class Gone(Struct, array_like=True, tag=True):
    """From the parent: this API process has ended, and nobody waits for its answers."""

    sender: int


class Quit(Struct, array_like=True, tag=True):
    """From the parent: end in order."""


ToEngine = Hello | Add | Compiled | Abort | Stop | Finished | Taken | Counted | Scrape | Gone | Quit
decode_to_engine = Decoder(ToEngine).decode

# --- to an API process ------------------------------------------------------------------------------------------------


class EngineInfo(Struct, tag=True):
    """What an API process must know about the engine."""

    address: str  # where the engine listens
    path: str  # of the checkpoint's directory
    model_name: str  # what clients call the model
    config: dict[str, Any]  # the fields of EngineConfig, resolved
    vocab_size: int
    eos_token_ids: list[int]
    sampling_defaults: dict[str, Any]


class Failed(Struct, tag=True):
    """Sent instead of an `EngineInfo`: why there is no engine."""

    kind: str
    message: str


class End(Struct, array_like=True):
    """Why a stream has ended. Comes with the last tokens of the stream."""

    stream: int
    finish_reason: FinishReason
    stop_reason: int | str | None  # never a stop string: the reader finds those


class Logprobs(Struct, array_like=True):
    """Log-probabilities of the new tokens of a stream."""

    stream: int
    counts: bytes  # int32: for each new token, how many tokens are listed at its place, itself included
    token_ids: bytes  # int32, of all listed tokens
    values: bytes  # float64
    ranks: bytes  # int32

    @classmethod
    def of(cls, stream: int, found: Sequence[TokenLogprobs]) -> "Logprobs":
        entries = [entry.items() for entry in found]
        listed = list(chain.from_iterable(entries))
        return cls(
            stream,
            pack("i", map(len, entries)),
            pack("i", (token_id for token_id, _ in listed)),
            pack("d", (value for _, (value, _) in listed)),
            pack("i", (rank for _, (_, rank) in listed)),
        )

    def entries(self) -> list[TokenLogprobs]:
        pairs = zip(unpack("d", self.values), unpack("i", self.ranks), strict=True)
        items = zip(unpack("i", self.token_ids), pairs, strict=True)
        return [{token: pair for _, (token, pair) in zip(range(n), items)} for n in unpack("i", self.counts)]  # noqa: B905


class Refused(Struct, array_like=True):
    key: int
    kind: str  # the name of the exception's class
    message: str


class Update(Struct, array_like=True):
    """What a step brought to the streams of one API process; if the process was slow, what several steps brought."""

    # In columns, since nearly every stream has one new token and nothing else.
    streams: bytes  # int64
    counts: bytes  # int32: how many new tokens each of these has
    token_ids: bytes  # int32, of all of them
    logprobs: list[Logprobs]
    prompt_logprobs: list[Logprobs]  # of whole prompts, their first token left out; `stream` is the request's key
    ends: list[End]
    metrics: list[tuple[int, RequestMetrics]]  # by request: sent with its first token, and at its end
    accepted: list[int]  # keys of requests
    refused: list[Refused]
    scrapes: list[tuple[int, bytes]]
    failure: str | None  # why the engine has ended; no update follows

    def deltas(self) -> Iterable[tuple[int, list[int]]]:
        """The new tokens by stream."""
        tokens, start = unpack("i", self.token_ids), 0
        for stream, count in zip(unpack("q", self.streams), unpack("i", self.counts), strict=True):
            yield stream, tokens[start : (start := start + count)]


decode_update = Decoder(Update).decode
decode_start = Decoder(EngineInfo | Failed).decode
