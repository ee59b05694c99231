"""Who asks what, and when: drawn from distributions, or read from a recorded trace. Made one query at a time.

A prompt is a list of token ids, since the prefix cache and the routers look at them. The text itself does not matter,
so long as no two texts begin alike that should not. All ids are below 256: of such integers Python has one object each,
which stay in the processor's cache while millions of prompts are copied and hashed.
"""

import csv
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from itertools import count
from math import exp
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import xxhash

VOCAB_SIZE = 256
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


class Workload(Protocol):
    """Where queries come from. The same seed gives the same queries, whatever becomes of them."""

    def queries(self) -> Iterator[Query]:
        """All that do not wait for an answer, by time."""
        ...

    def follow_up(self, query: Query, token_ids: list[int], now: float) -> Query | None:
        """What the client of `query` sends next, now that the answer is there. `token_ids`: prompt and answer."""
        ...


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


class Synthetic:
    """Queries by distributions.

    rate:            queries per second, the later turns of conversations included.
    cv:              coefficient of variation of the gaps between arrivals, which follow a gamma distribution: 1 is a
                     Poisson process, more comes in bursts, 0 is as regular as a clock.
    prompt_tokens:   what a user writes in a turn.
    shared_prefix:   tokens before that which many queries share, such as a system prompt;
    num_prefixes:    how many different ones there are, each as frequent as the others.
    turns:           mean number of turns of a conversation (geometric). A turn's prompt is all that was said before,
                     and what the user writes then.
    think_seconds:   mean time from an answer to the next turn (exponential).
    """

    def __init__(
        self,
        *,
        rate: float,
        seconds: float | None = None,
        num_queries: int | None = None,
        cv: float = 1.0,
        prompt_tokens: Lengths,
        output_tokens: Lengths,
        shared_prefix: int = 0,
        num_prefixes: int = 1,
        turns: float = 1.0,
        think_seconds: float = 10.0,
        seed: int = 0,
    ) -> None:
        """Arrivals end after `seconds`, or with the first turn of the last of `num_queries`; one of them is given."""
        self.rate, self.cv, self.turns, self.think_seconds = rate, cv, turns, think_seconds
        self.seconds, self.num_queries = seconds, num_queries
        self.prompt_tokens, self.output_tokens = prompt_tokens, output_tokens
        self.texts = Texts()
        self.prefixes = [self.texts.new(shared_prefix) for _ in range(num_prefixes)] if shared_prefix else []
        self._numbers = count()
        self._rng = random.Random(seed)

    def queries(self) -> Iterator[Query]:
        rng, time, mean = self._rng, 0.0, self.turns / self.rate  # of the gaps between conversations
        for _ in count() if self.num_queries is None else range(self.num_queries):
            if self.cv:
                shape = 1 / self.cv**2
                time += rng.gammavariate(shape, mean / shape)
            else:
                time += mean
            if self.seconds is not None and time >= self.seconds:
                return
            yield self._first(time)

    def _first(self, time: float) -> Query:
        first = self._turn()
        prompt = self.texts.new(first.user_tokens)
        if self.prefixes:
            prompt = self._rng.choice(self.prefixes) + prompt
        number = next(self._numbers)
        if self.turns == 1:
            return Query(number, time, prompt, first.output_tokens)
        turns = []
        while self._rng.random() > 1 / self.turns:
            turns.append(self._turn())
        return Query(number, time, prompt, first.output_tokens, str(number), turns)

    def _turn(self) -> Turn:
        rng = self._rng
        think = 0.0 if self.turns == 1 else rng.expovariate(1.0) * self.think_seconds
        return Turn(self.prompt_tokens.draw(rng), self.output_tokens.draw(rng), think)

    def follow_up(self, query: Query, token_ids: list[int], now: float) -> Query | None:
        if not query.turns:
            return None
        turn, *rest = query.turns
        prompt = token_ids + self.texts.new(turn.user_tokens)
        return Query(next(self._numbers), now + turn.think_seconds, prompt, turn.output_tokens, query.session, rest)


class Replay:
    """The queries of a recorded trace, at their times. Two public formats are known by the columns of their first line:

    - Azure's LLM inference traces (Patel et al., Splitwise, ISCA 2024; Stojkovic et al., DynamoLLM, HPCA 2025):
      TIMESTAMP, ContextTokens, GeneratedTokens.
    - BurstGPT (Wang et al. 2024): Timestamp, Request tokens, Response tokens, and perhaps Session ID. Lines without a
      response were failures, and are left out.

    A trace has lengths and no text. Prompts of one session are beginnings of one text, so that a longer prompt finds
    the blocks of a shorter one. Other prompts share nothing.

    speed: 2 plays the trace in half the time.
    """

    def __init__(
        self,
        path: Path,
        *,
        seconds: float | None = None,
        num_queries: int | None = None,
        speed: float = 1,
    ) -> None:
        self.path, self.seconds, self.num_queries, self.speed = path, seconds, num_queries, speed
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
            for row in reader:
                try:
                    time, num_prompt, num_output = seconds_of(row[when]), int(row[prompt]), int(row[output])
                except (ValueError, IndexError) as error:
                    raise ValueError(f"{self.path}, line {reader.line_num}: {error}") from None
                if num_prompt < 1 or num_output < 1:
                    continue
                start = time if start is None else start
                time = (time - start) / self.speed
                if time < before:
                    raise ValueError(
                        f"{self.path}, line {reader.line_num}: earlier than the line above; sort the file by time"
                    )
                before, number = time, next(numbers)
                if (self.seconds is not None and time >= self.seconds) or number == self.num_queries:
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

    def follow_up(self, query: Query, token_ids: list[int], now: float) -> Query | None:
        return None


def seconds_of(text: str) -> float:
    """A number of seconds, or a date and time. Raises ValueError for anything else."""
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text.strip()).timestamp()
