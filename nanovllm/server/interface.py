"""What the application needs of an engine. `AsyncLLM` gives it in the same process, and `EngineClient` from another."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from nanovllm.admission import Checked
from nanovllm.config import EngineConfig
from nanovllm.engine.engine import LLMEngine
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.stream import OutputStream
from nanovllm.text.tokenizer import Tokenizer


class Engine(Protocol):
    """Shared by all requests of an application."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def config(self) -> EngineConfig: ...
    @property
    def vocab_size(self) -> int:
        """The model's, which may have more rows than its tokenizer has tokens. Any of them may be generated."""
        ...

    @property
    def sampling_defaults(self) -> Mapping[str, Any]: ...

    def check(self, prompt: Mapping[str, Any], params: SamplingParams) -> Checked:
        """Encode {"prompt": text} or {"prompt_token_ids": ids}, both with an optional "cache_salt", and see whether it
        can run. Any thread may call this. Raises ValueError or TypeError for what could never run."""
        ...

    def submit(self, requests: Sequence[Checked], *, priority: int = 0) -> Sequence[OutputStream]:
        """Queue all of these requests, or none. Raises EngineDead, and QueueFull, which may also come from `accepted`
        of the streams."""
        ...

    def check_health(self) -> None:
        """Raises EngineDead once no request can be served any more."""
        ...

    async def shutdown(self, drain: bool = True) -> None: ...


class Observer(Protocol):
    """Counts what becomes of one request."""

    def saw(self, delta: RequestOutput) -> None: ...
    def close(self, reason: str = "abort") -> None: ...


class Meters(Protocol):
    """Where requests are counted, and what is told of it."""

    def count(self, name: str, *labels: str) -> None:
        """One more of a counter in `metrics.COUNTERS`."""
        ...

    def observe(self) -> Observer: ...

    async def scrape(self) -> bytes:
        """The text for Prometheus. Raises EngineDead where there is nobody to ask."""
        ...


class HasEngine(Protocol):
    @property
    def engine(self) -> LLMEngine: ...


class Counted(Protocol):
    """What the gauges of `Metrics` read."""

    @property
    def llm(self) -> HasEngine: ...
    @property
    def num_waiting(self) -> int: ...
    def check_health(self) -> None: ...
