"""Who asks what, and when: drawn from distributions, or read from a recorded trace. Made one query at a time.

A prompt is a list of token ids, since the prefix cache and the routers look at them. The text itself does not matter,
so long as no two texts begin alike that should not. All ids are below 256: of such integers Python has one object each,
which stay in the processor's cache while millions of prompts are copied and hashed.
"""

import csv
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import lru_cache
from itertools import count
from math import exp, isfinite
from pathlib import Path
from typing import Literal, NamedTuple

import xxhash

VOCAB_SIZE = 256
OF_REPLAY = {"replay", "speed", "seconds", "queries"}  # fields of `WorkloadOptions`
SHAPES = "512 (always so many), uniform:100,1024 or lognormal:512,0.6 (median, and sigma of the logarithm)"


class Turn(NamedTuple):
    """What follows in a conversation, once the answer has been read."""

    user_tokens: int
    output_tokens: int
    think_seconds: float


@dataclass(slots=True, eq=False)
class Query:
    """What a client sends, until it gets all of the answer or gives up."""

    number: int  # names it; counts from 0
    time: float  # when it is first sent, in seconds
    prompt: list[int]
    max_tokens: int
    session: str | None = None  # the conversation, for routers that keep one together
    turns: Sequence[Turn] = ()  # that follow in the conversation
    num_refusals: int = 0  # set by the fleet
    digests: list[bytes] = field(default_factory=list)  # set by routers: of the prompt's full blocks


class Workload(ABC):
    """Where queries come from. The same seed gives the same queries, whatever becomes of them."""

    @abstractmethod
    def queries(self) -> Iterator[Query]:
        """All that do not wait for an answer, by time."""

    def follow_up(self, query: Query, token_ids: list[int], now: float) -> Query | None:
        """What the client of `query` sends next, now that the answer is there. `token_ids`: prompt and answer."""
        return None


@dataclass(frozen=True)
class Lengths:
    """A distribution of numbers of tokens. `first` and `second`: the only number; the least and the most; the median,
    and sigma of the logarithm."""

    kind: Literal["fixed", "uniform", "lognormal"]
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Raises ValueError for what is none of `SHAPES`."""
        kind, _, numbers = text.rpartition(":")
        try:
            values = [float(number) for number in numbers.split(",")]
        except ValueError:
            values = []
        good = {"": 1, "fixed": 1, "uniform": 2, "lognormal": 2}.get(kind) == len(values)
        if not good or values[0] < 1 or (kind == "uniform" and values[1] < values[0]) or values[-1] < 0:
            raise ValueError(f"{text!r} is no distribution of lengths; write {SHAPES}")
        return cls(kind or "fixed", *values)  # type: ignore[arg-type]  # it is one of them

    def draw(self, rng: random.Random) -> int:
        if self.kind == "fixed":
            return int(self.first)
        if self.kind == "uniform":
            return rng.randint(int(self.first), int(self.second))
        return max(1, round(self.first * exp(self.second * rng.gauss(0.0, 1.0))))

    def __str__(self) -> str:
        return f"{self.kind}:{self.first:g}" + (f",{self.second:g}" if self.kind != "fixed" else "")

    @property
    def mean(self) -> float:
        if self.kind == "uniform":
            return (self.first + self.second) / 2
        return self.first * exp(self.second**2 / 2)


class Texts:
    """Token ids by the million, made cheaply: slices of one random text, each behind a beginning of its own."""

    SIZE = 2**17

    def __init__(self) -> None:
        self._text = random_text(self.SIZE)
        self._numbers = count()

    def new(self, length: int) -> list[int]:
        """A text that begins like no other."""
        return self._numbered(next(self._numbers), length)

    def named(self, name: str, length: int) -> list[int]:
        """The beginning of the text with this name: a longer one begins with a shorter one."""
        return self._numbered(xxhash.xxh3_64_intdigest(name.encode()), length)

    def _numbered(self, number: int, length: int) -> list[int]:
        """Eight tokens that say the number, and a slice."""
        start = number * 7919 % self.SIZE
        found = self._text[start : start + max(0, length - 8)]
        found[:0] = number.to_bytes(8, "little")[:length]
        while len(found) < length:
            found += self._text[: length - len(found)]
        return found


@lru_cache(maxsize=1)
def random_text(length: int) -> list[int]:
    return random.Random(0).choices(range(VOCAB_SIZE), k=length)


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """Who asks what, and when. Either `rate` or `replay` is given. With `rate`, at least one of `seconds` and `queries`
    is given, too; a trace ends by itself. Raises ValueError for what is missing, out of range, or without effect.

    rate:            queries per second, the later turns of conversations included.
    seconds:         in which first turns come.
    queries:         so many first turns at most.
    cv:              coefficient of variation of the gaps between arrivals, which follow a gamma distribution: 1 is a
                     Poisson process, more comes in bursts, 0 is as regular as a clock.
    prompt_tokens:   what a user writes in a turn.
    shared_prefix:   tokens before that which many queries share, such as a system prompt;
    num_prefixes:    how many different ones there are, each as frequent as the others.
    turns:           mean number of turns of a conversation (geometric). A turn's prompt is all that was said before,
                     and what the user writes then.
    think_seconds:   mean time from an answer to the next turn (exponential).
    replay:          a recorded trace in place of the distributions: see `Replay`. `seconds` and `queries` end it, too.
    speed:           2 plays the trace in half the time.
    """

    rate: float | None = None
    seconds: float | None = None
    queries: int | None = None
    cv: float = 1.0
    prompt_tokens: Lengths = Lengths("lognormal", 512.0, 0.6)
    output_tokens: Lengths = Lengths("lognormal", 128.0, 0.6)
    shared_prefix: int = 0
    num_prefixes: int = 1
    turns: float = 1.0
    think_seconds: float = 10.0
    replay: Path | None = None
    speed: float = 1.0

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.replay is None):
            raise ValueError("give rate, in queries per second, or replay, a file with a trace; one of them")
        if self.replay is None and self.seconds is None and self.queries is None:
            raise ValueError("give seconds or queries, so that the arrivals end")
        if self.replay is not None and not self.replay.is_file():
            raise ValueError(f"replay={str(self.replay)!r}: there is no such file")
        foreign = {"speed"} if self.replay is None else {option.name for option in fields(self)} - OF_REPLAY
        for option in fields(self):
            if option.name in foreign and getattr(self, option.name) != option.default:
                beside = "with" if self.replay else "without"
                raise ValueError(f"{option.name} has no effect {beside} replay; leave it out")
        for name in ("rate", "seconds", "queries", "speed"):
            if (value := getattr(self, name)) is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a positive number; got {value!r}")
        for name, least in (("cv", 0), ("shared_prefix", 0), ("think_seconds", 0), ("num_prefixes", 1), ("turns", 1)):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)!r}")

    def make(self, seed: int) -> Workload:
        return Synthetic(self, seed) if self.replay is None else Replay(self)


class Synthetic(Workload):
    """Queries by distributions: see `WorkloadOptions`."""

    def __init__(self, options: WorkloadOptions, seed: int = 0) -> None:
        self.options = o = options
        self.texts = Texts()
        self.prefixes = [self.texts.new(o.shared_prefix) for _ in range(o.num_prefixes)] if o.shared_prefix else []
        self._numbers = count()
        self._rng = random.Random(seed)

    def queries(self) -> Iterator[Query]:
        rng, time, o = self._rng, 0.0, self.options
        assert o.rate is not None
        mean = o.turns / o.rate  # of the gaps between conversations
        for _ in count() if o.queries is None else range(o.queries):
            if o.cv:
                shape = 1 / o.cv**2
                time += rng.gammavariate(shape, mean / shape)
            else:
                time += mean
            if o.seconds is not None and time >= o.seconds:
                return
            yield self._first(time)

    def _first(self, time: float) -> Query:
        first = self._turn()
        prompt = self.texts.new(first.user_tokens)
        if self.prefixes:
            prompt = self._rng.choice(self.prefixes) + prompt
        number = next(self._numbers)
        if self.options.turns == 1:
            return Query(number, time, prompt, first.output_tokens)
        turns = []
        while self._rng.random() > 1 / self.options.turns:
            turns.append(self._turn())
        return Query(number, time, prompt, first.output_tokens, str(number), turns)

    def _turn(self) -> Turn:
        rng, o = self._rng, self.options
        think = 0.0 if o.turns == 1 else rng.expovariate(1.0) * o.think_seconds
        return Turn(o.prompt_tokens.draw(rng), o.output_tokens.draw(rng), think)

    def follow_up(self, query: Query, token_ids: list[int], now: float) -> Query | None:
        if not query.turns:
            return None
        turn, *rest = query.turns
        prompt = token_ids + self.texts.new(turn.user_tokens)
        return Query(next(self._numbers), now + turn.think_seconds, prompt, turn.output_tokens, query.session, rest)


class Replay(Workload):
    """The queries of a recorded trace, at their times. Two public formats are known by the columns of their first line:

    - Azure's LLM inference traces (Patel et al., Splitwise, ISCA 2024; Stojkovic et al., DynamoLLM, HPCA 2025):
      TIMESTAMP, ContextTokens, GeneratedTokens.
    - BurstGPT (Wang et al. 2024): Timestamp, Request tokens, Response tokens, and perhaps Session ID.

    Lines without a response (0, or an empty field) were failures, and are left out.

    A trace has lengths and no text. Prompts of one session are beginnings of one text, so that a longer prompt finds
    the blocks of a shorter one. Other prompts share nothing.
    """

    def __init__(self, options: WorkloadOptions) -> None:
        assert options.replay is not None
        self.path, self.options = options.replay, options
        self.texts = Texts()

    def queries(self) -> Iterator[Query]:
        """Raises ValueError, with file and line, for what cannot be read, and for times that run back."""
        with open(self.path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            names = [name.lower().replace(" ", "").replace("_", "") for name in next(reader, [])]
            prompt = self._column(names, "contexttokens", "requesttokens")
            output = self._column(names, "generatedtokens", "responsetokens")
            when = self._column(names, "timestamp")
            session = names.index("sessionid") if "sessionid" in names else None
            start: float | None = None
            before, numbers = 0.0, count()
            for row in filter(None, reader):
                try:
                    time, num_prompt, num_output = seconds_of(row[when]), tokens_of(row[prompt]), tokens_of(row[output])
                except (ValueError, IndexError) as error:
                    raise ValueError(f"{self.path}, line {reader.line_num}: {error}") from None
                if num_prompt < 1 or num_output < 1:
                    continue
                start = time if start is None else start
                time = (time - start) / self.options.speed
                if time < before:
                    raise ValueError(
                        f"{self.path}, line {reader.line_num}: earlier than the line above; sort the file by time"
                    )
                before, number = time, next(numbers)
                ends = self.options.seconds
                if (ends is not None and time >= ends) or number == self.options.queries:
                    return
                name = row[session] if session is not None and session < len(row) else ""
                text = self.texts.named(name, num_prompt) if name else self.texts.new(num_prompt)
                yield Query(number, time, text, num_output, name or None)

    def _column(self, names: list[str], *candidates: str) -> int:
        for name in candidates:
            if name in names:
                return names.index(name)
        raise ValueError(
            f"{self.path}: the first line has no column {' or '.join(candidates)}; known are Azure's traces "
            "(TIMESTAMP, ContextTokens, GeneratedTokens) and BurstGPT's (Timestamp, Request tokens, Response tokens)"
        )


def tokens_of(text: str) -> int:
    """A number of tokens, which may be written as 472.0; 0 for an empty field. Raises ValueError for anything else."""
    number = float(text.strip() or 0)
    if not number.is_integer():
        raise ValueError(f"{text!r} is not a number of tokens")
    return int(number)


def seconds_of(text: str) -> float:
    """Seconds, of a number, or of a date and time (in UTC if it has no zone). Raises ValueError for anything else."""
    try:
        seconds = float(text)
    except ValueError:
        time = datetime.fromisoformat(text.strip())
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    if not isfinite(seconds):
        raise ValueError(f"{text!r} is not a time")
    return seconds
