"""What all stages share: sampling parameters, sequences, the checks on what comes in, the sampler, and events.

Nothing here is an idea of its own. A stage is a file that says how tokens become more tokens. This file keeps what
every stage needs and no stage changes.
"""

import random
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from operator import index
from typing import Any, Literal, Protocol

import torch
import xxhash

from stages.model import ModelConfig

Event = dict[str, Any]
OnEvent = Callable[[Event], None]


@dataclass(frozen=True)
class SamplingParams:
    """How one request wants its tokens chosen.

    temperature: 0 is greedy; otherwise the logits are divided by it before the softmax.
    max_tokens:  at most this many tokens are generated (the prompt does not count).
    ignore_eos:  go on past an end-of-sequence token, as benchmarks do.
    seed:        the same seed gives the same tokens, alone or in any batch. None draws a fresh one.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 (greedy) or a positive number, got {self.temperature}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")


class Engine(Protocol):
    """The one interface of all seven stages. `model` is a directory or a Hugging Face hub id.

    `dtype=None` means the checkpoint's own on a GPU and float32 on a CPU. No stage is for threads: call it from one.
    """

    def __init__(
        self,
        model: str,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        on_event: OnEvent | None = None,
    ) -> None: ...

    def generate(self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
        """Token ids in, generated token ids out: without the prompt, with the EOS token that ended them."""
        ...


@dataclass(eq=False)
class Sequence:
    """One request on its way: the prompt, then every token chosen so far, in one list."""

    request: int  # index into the prompts of this `generate` call
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    # Stages 3 and up: where this sequence's keys and values live, and for how many of its tokens they are computed.
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def limit(self) -> int:
        """Length at which the sequence ends with "length", prompt included."""
        return self.num_prompt_tokens + self.params.max_tokens

    @property
    def max_slots(self) -> int:
        """How many slots for keys and values it can ever need: the last token is never fed back, so it needs none."""
        return self.limit - 1

    def finish_reason(self, eos_token_ids: frozenset[int]) -> Literal["stop", "length"] | None:
        """Why the sequence is over after its newest token, or None if it goes on."""
        if not self.params.ignore_eos and self.num_output_tokens and self.token_ids[-1] in eos_token_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.limit else None


class Trace:
    """Tells a listener what happens in an engine: plain dicts, for notebooks, demos and tests.

    Types: added (prompt_tokens), admitted (cached), scheduled (tokens, cached), token (ids), preempted (tokens),
    finished (reason), blocks (taken, shared, freed). Nearly free without a listener.
    """

    def __init__(self, on_event: OnEvent | None) -> None:
        self.on_event = on_event
        self.step = 0

    def emit(self, type: str, request: int | None = None, **details: Any) -> None:
        if self.on_event is not None:
            event = {"t": time.perf_counter(), "step": self.step, "type": type, "request": request}
            self.on_event(event | details)


def check_options(*, attention: str = "gather", **sizes: int) -> None:
    """Check an engine's options before a model is loaded. Raises ValueError naming the option and its value."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if attention not in ("gather", "triton"):
        raise ValueError(f"attention must be 'gather' or 'triton', got {attention!r}")


def make_sequences(
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams],
    *,
    vocab_size: int,
    max_model_len: int,
) -> list[Sequence]:
    """Check every request before any of them starts, and turn them into sequences in the order given.

    Raises ValueError naming the request, the value and the remedy.
    """
    if isinstance(params, SamplingParams):
        params = [params] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError(f"params has {len(params)} entries for {len(prompts)} prompts; give one each, or a single one")
    sequences = []
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        token_ids = list(map(index, prompt))  # numpy's integers become Python's
        if not token_ids:
            raise ValueError(f"prompts[{i}] is empty; a prompt needs at least one token (a BOS or EOS id will do)")
        bad = next((t for t in token_ids if not 0 <= t < vocab_size), None)
        if bad is not None:
            raise ValueError(f"prompts[{i}] contains token id {bad}, outside the vocabulary of {vocab_size}")
        if len(token_ids) + p.max_tokens > max_model_len:
            raise ValueError(
                f"prompts[{i}]: {len(token_ids)} prompt tokens + max_tokens {p.max_tokens} exceed the model's "
                f"{max_model_len} positions; shorten the prompt or lower max_tokens"
            )
        seed = p.seed if p.seed is not None else random.getrandbits(63)
        sequences.append(Sequence(i, token_ids, len(token_ids), p, seed))
    return sequences


def accept(
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams],
    config: ModelConfig,
    trace: Trace,
    check: Callable[[Sequence], None] = lambda seq: None,
) -> list[Sequence]:
    """How every `generate` begins: sequences of the requests if all of them pass all checks, and the event "added".

    `check` raises ValueError for a sequence that the engine has no room for.
    """
    limits = {"vocab_size": config.vocab_size, "max_model_len": config.max_position_embeddings}
    sequences = make_sequences(prompts, params, **limits)
    for seq in sequences:
        check(seq)
    for seq in sequences:
        trace.emit("added", seq.request, prompt_tokens=seq.num_prompt_tokens)
    return sequences


def sample(logits: torch.Tensor, sequences: SequenceOf[Sequence]) -> list[int]:
    """Choose the next token of each sequence from its row of `logits` [N, V] (float32, any device).

    The Gumbel-max trick: argmax(logit + T * gumbel) draws from softmax(logit / T), and T = 0 is plain argmax with no
    special case. The noise depends on the sequence's seed and the index of the token alone, so neither the batch it is
    in nor an interruption can change what a request gets (Gumbel, 1954; Maddison et al., "A* Sampling", 2014).
    """
    logits = logits.float().cpu()
    chosen: list[int] = logits.argmax(dim=-1).tolist()
    for i, seq in enumerate(sequences):
        if seq.params.temperature > 0:
            chosen[i] = int((logits[i] + seq.params.temperature * gumbel(seq, logits.shape[1])).argmax())
    return chosen


def gumbel(seq: Sequence, vocab_size: int) -> torch.Tensor:
    """The noise [V] float64 of the next token of `seq`: a function of its seed and of how many tokens it has so far."""
    key = xxhash.xxh64_intdigest(f"{seq.seed}:{seq.num_output_tokens}".encode())
    generator = torch.Generator().manual_seed(key)
    # -log of an exponential variable is Gumbel; float64, because in float32 one draw in 2**24 is exactly 0
    return -torch.empty(vocab_size, dtype=torch.float64).exponential_(generator=generator).log()


def append_token(seq: Sequence, token: int, eos_token_ids: frozenset[int], trace: Trace) -> bool:
    """Add a chosen token to its sequence, tell the listener, and return whether the sequence is now over."""
    seq.token_ids.append(token)
    trace.emit("token", seq.request, ids=[token])
    reason = seq.finish_reason(eos_token_ids)
    if reason is not None:
        trace.emit("finished", seq.request, reason=reason)
    return reason is not None
