"""The time of a step from its counts: a sum of terms, each with a physical cause, and a floor.

The tokens that are computed, padding included, cost what a table says: reading the weights, and the matrix products.
Recorded sizes have kernels of their own, so no line would go through all of them. Attention of decodes reads their
keys. With few keys the programs spend more time waiting for memory than reading, so the first keys cost more. Keys that
several sequences share are read from memory once, and then from the device's cache, which is quicker. Attention
of prompts is a sum: a time for all pairs of a query and a key, and one for walking through the keys of the longest
context.

How a step is computed follows from its size (nanovllm/graphs). Decodes are padded to the next recorded size. In a step
with few tokens, each token of a prompt is a decode of its own, which reads its whole context. Other steps with prompts
are padded to the next size with prompts, whose kernels read the keys of decodes more slowly. What no recording has room
for is launched kernel by kernel, and takes no less than the launches do.

All factors are at least 0 and all counts only grow with the work. So more work never takes less time. That is not quite
true of the engine: some steps would be quicker in a larger recording than in the one that they are given.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import Any

from nanovllm.simulate.needs import Architecture, Needs
from nanovllm.simulate.step_shape import StepShape

# Terms of the device, with what their factors grow with from one model to another
DEVICE_TERMS = {
    "decode_key": "keys",
    "first_key": "layers",  # of the first `FIRST_KEYS` keys of decodes, added to the above; none on a CPU
    "key_beside_prompts": "keys",  # added to the above, where decodes are not in a recording of their own
    "prompt": "layers",
    "prompt_pair": "pairs",
    "prompt_key": "layers",  # of the longest context of a chunk: few programs walk through all of its keys
    "own_key": "keys",  # of prompts whose tokens are decodes of their own, in place of the two above
    "many_sequences": "layers",  # once, if a recording with prompts has more than `FEW_SEQUENCES`
    "guess_step": "layers",  # once, if there is any guess
    "masked_step": "layers",  # once, if there is any mask: the step is two recordings, and waits for the masks between
    "masked": "vocabulary",
    "sample": "head",
    "shared_key": "keys",  # in place of "decode_key", if the device finds some of the keys in its cache
    "with_prompts": "layers",  # once, if the step is in no recording of decodes
    "first_prompt_key": "layers",  # of the first `FIRST_PROMPT_KEYS` of the longest context, added to "prompt_key"
}
FIRST_KEYS = 4096
LOST = 0.8  # of the keys for which the device's cache has no room: chosen to fit steps of an H200
FIRST_PROMPT_KEYS = 2048  # a longer context is cut among programs if the chunk has few tokens
FEW_SEQUENCES = 63  # in the smaller ones of the recordings with prompts, beside a row of padding
# Where tokens of prompts are decodes of their own, no more keys are counted than this share of the most that such a
# recording may read, and than so many for each key of the longest context. With more keys, larger recordings are
# quicker on an H200.
OWN_SHARE, OWN_QUERIES = 0.5, 160
# Terms of the host: "prompt_step" once, if there is any chunk of a prompt; "prompt" for each chunk
HOST_TERMS = ("step", "sequence", "prompt_token", "sample", "prompt_step", "prompt")


class Kind(Enum):
    """How a step is computed."""

    DECODES = 1  # in a recording of decodes, or without any recordings
    PROMPTS = 2  # in a recording with prompts
    LAUNCHED = 3  # kernel by kernel


@dataclass(frozen=True)
class Recordings:
    """Which steps are replayed as a CUDA graph (nanovllm/graphs/sizes.py). Without any, nothing is padded.

    decodes: numbers of tokens of the recordings of decodes, ascending; guesses count as tokens. max_several: tokens of
    such a recording in which sequences have several; max_read: bytes of keys and values that these read in a layer.
    prompts: numbers of tokens of the recordings of steps with prompts. max_sequences: that such a recording has room
    for, a row of padding included. max_operations: of the matrix products of a layer; a step with prompts that has more
    is not recorded.
    layer_operations, layer_key_bytes: operations, and bytes of keys and values, of a token in a layer. These depend on
    the model. chunk_weight: how many times each key of a chunk counts for `max_read`.
    """

    decodes: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()
    max_several: int = 0
    max_read: int = 0
    max_sequences: int = 0
    max_operations: float = 0.0
    layer_operations: float = 0.0
    layer_key_bytes: float = 1.0
    chunk_weight: int = 1

    def for_model(self, model: Architecture, itemsize: int) -> "Recordings":
        layers = model.num_hidden_layers
        operations, key_bytes = 2 * model.num_active_parameters / layers, Needs(model, itemsize).key_bytes / layers
        return replace(self, layer_operations=operations, layer_key_bytes=key_bytes)

    def for_seats(self, seats: int) -> "Recordings":
        """Of an engine in which so many sequences may run: there are recordings for all of them, in steps of 16."""
        if not self.decodes or seats <= self.decodes[-1]:
            return self
        decodes = *self.decodes, *range(self.decodes[-1] + 16, seats, 16), seats
        return replace(self, decodes=decodes, max_sequences=seats + 1)

    @cached_property
    def largest(self) -> int:
        """Tokens of the largest recording of a step with prompts; 0 if there is none."""
        fitting = [n for n in self.prompts if n * self.layer_operations <= self.max_operations]
        return fitting[-1] if fitting else 0

    @cached_property
    def first_keys(self) -> int:
        """How many keys of decodes cost more than the others."""
        return FIRST_KEYS if self.decodes else 0

    @cached_property
    def max_keys(self) -> float:
        """How many keys may be read by a recording of decodes in which sequences have several tokens."""
        return self.max_read / self.layer_key_bytes

    def run(self, shape: StepShape) -> tuple[int, Kind]:
        """The tokens that are computed for a step, padding included, and how."""
        tokens = shape.decodes + shape.prompt_tokens + shape.guesses
        if not self.decodes:
            return tokens, Kind.DECODES
        several = shape.prompts or shape.guesses
        most = self.max_several if several else self.decodes[-1]
        padded = padded_to(self.decodes, tokens)
        if tokens <= most and (not several or self.read_keys(shape) <= self.max_keys):
            return padded, Kind.DECODES
        # Rows that are launched one by one are not padded. They count as if they were, so that more work never counts
        # as less: what they cost is launching.
        padded = max(padded, padded_to(self.prompts, tokens))
        launched = tokens > self.largest or sequences_of(shape) > self.max_sequences
        return padded, Kind.LAUNCHED if launched else Kind.PROMPTS

    def read_keys(self, shape: StepShape) -> float:
        """The keys that count for `max_keys`: those that sequences with several tokens read, if each token reads the
        whole context of its chunk. Exact for one chunk, and an estimate for several."""
        chunks = min(shape.prompt_tokens * shape.prompt_keys, 2 * shape.prompt_pairs)
        guessing = shape.decode_keys + shape.shared_keys + shape.guess_keys if shape.guesses else 0
        return self.chunk_weight * chunks + guessing


def sequences_of(shape: StepShape) -> int:
    """How many places of a recording with prompts a step needs."""
    return max(shape.decodes + shape.prompts + 1, shape.samples + shape.guesses)


def padded_to(sizes: tuple[int, ...], tokens: int) -> int:
    """The first of these sizes that is large enough; `tokens` itself beyond the last."""
    place = bisect_left(sizes, tokens)
    return sizes[place] if tokens and place < len(sizes) else tokens


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. `device` and `host` have a factor for each term, in seconds per count.

    table: [tokens, seconds], ascending in both: what the tokens that are computed take. Up to the first row it is flat.
    Between two rows it is a line, which goes on beyond the last row.
    """

    table: tuple[tuple[int, float], ...]
    device: Mapping[str, float]
    host: Mapping[str, float]
    launch: float = 0.0  # seconds that launching a step kernel by kernel takes at least
    recordings: Recordings = field(default_factory=Recordings)
    cache_bytes: float = math.inf  # of the device: what sequences share may be read from there
    experts: float = 0.0  # seconds that reading the weights of all experts takes; no card was measured with them
    chosen_share: float = 0.0  # of the experts, for each token

    def __post_init__(self) -> None:
        # Looked up once, not per step: a simulation has millions of them.
        object.__setattr__(self, "_device", tuple(self.device.get(name, 0.0) for name in DEVICE_TERMS))
        object.__setattr__(self, "_host", tuple(self.host.get(name, 0.0) for name in HOST_TERMS))
        object.__setattr__(self, "_known", {})

    def of_tokens(self, tokens: float) -> float:
        """Seconds by the table."""
        known: dict[float, float] = self._known  # type: ignore[attr-defined]
        seconds = known.get(tokens)
        if seconds is None:
            seconds = known[tokens] = line_at(self.table, tokens)
        return seconds

    def device_seconds(self, shape: StepShape) -> float:
        """How long the device is busy with a step."""
        factors: tuple[float, ...] = self._device  # type: ignore[attr-defined]
        tokens, kind = self.recordings.run(shape)
        read, cached = self.keys_of_decodes(shape, kind)
        first, keys = self.recordings.first_keys, read + cached
        reading = factors[0] * read
        if cached:  # while shared keys are found in the cache, other keys are read from memory
            first_time = min(shape.shared_beginnings, read)
            reading = max(reading, factors[0] * first_time + factors[12] * (keys - first_time))
        seconds = self.of_tokens(tokens) + reading
        seconds += factors[1] * (keys if keys < first else first)
        seconds += factors[11] * shape.samples
        if self.experts:
            seconds += self.experts * (1 - (1 - self.chosen_share) ** tokens)
        if kind is not Kind.DECODES:
            seconds += factors[13] + factors[2] * (shape.decode_keys + shape.shared_keys)
            if sequences_of(shape) > FEW_SEQUENCES:
                seconds += factors[7]
        if shape.prompts:
            seconds += factors[3] * shape.prompts
            attention = factors[4] * shape.prompt_pairs + factors[5] * shape.prompt_keys
            attention += factors[14] * min(shape.prompt_keys, FIRST_PROMPT_KEYS)
            own, few = factors[6] * self.own_keys(shape), self.recordings.max_several
            if kind is not Kind.DECODES:
                own -= factors[13]
            if tokens > few:  # such a step takes no less than the same step with few tokens
                own -= self.of_tokens(tokens) - self.of_tokens(few)
            seconds += max(attention, own)
        if shape.guesses:
            seconds += factors[8]
        if shape.masked:
            seconds += factors[9] + factors[10] * shape.masked
        return max(seconds, self.launch) if kind is Kind.LAUNCHED else seconds

    def keys_of_decodes(self, shape: StepShape, kind: Kind) -> tuple[int, int]:
        """The keys that decodes and guesses read from memory, and those that they find in the device's cache.

        In a recording with prompts, guesses share the keys of their sequence. But as many are counted as a recording of
        decodes may read at most: otherwise a step with more guesses would take less time.
        """
        read, cached = shape.decode_keys, shape.shared_keys
        guessed = shape.guess_keys
        if guessed and kind is not Kind.DECODES:
            guessed = min(guessed, max(0, int(self.recordings.max_keys) - read - cached))
        lost = self.lost_keys(shape) if cached else 0
        return read + guessed + lost, cached - lost

    def lost_keys(self, shape: StepShape) -> int:
        """How many of the shared keys are no longer in the cache when another sequence reads them.

        The sequences that share a beginning read it at different times. Between two of them, the device reads each
        beginning once, and a part of the other keys: with r readers of a beginning, one r-th. If the cache has room for
        all of this, the shared keys are still there. So they stay from some number of readers on. As many keys are lost
        as fewer readers would share, times LOST: some sequences read a key at about the same time.
        """
        room = self.cache_bytes / self.recordings.layer_key_bytes
        if shape.decode_keys <= room:
            return 0
        if shape.shared_beginnings >= room:
            return int(LOST * shape.shared_keys)
        lost = shape.shared_beginnings * (shape.decode_keys - room) / (room - shape.shared_beginnings)
        return int(LOST * min(shape.shared_keys, lost))

    def own_keys(self, shape: StepShape) -> float:
        """The keys that tokens of prompts read, each token for itself. See `OWN_SHARE` for the most that count."""
        most = OWN_SHARE * self.recordings.max_keys / self.recordings.chunk_weight
        return min(shape.prompt_pairs, most, OWN_QUERIES * shape.prompts * shape.prompt_keys)

    def counts(self, shape: StepShape) -> list[tuple[int, list[float]]]:
        """What `fit` finds the factors of. Each entry is one way to count the step: the tokens to look up in the table,
        and the counts of the device's terms in the order of `DEVICE_TERMS`. With prompts there are two ways: their
        tokens share the keys, or each reads keys of its own. With keys in the device's cache there are two as well: the
        others come from memory, or all come through the cache. The way that takes longest is the time of the step."""
        tokens, kind = self.recordings.run(shape)
        beside = kind is not Kind.DECODES
        read, cached = self.keys_of_decodes(shape, kind)
        by_prompts = beside * (shape.decode_keys + shape.shared_keys)
        keys = [min(read + cached, self.recordings.first_keys), by_prompts, shape.prompts]
        rest = [float(beside and sequences_of(shape) > FEW_SEQUENCES), float(shape.guesses > 0)]
        rest += [float(shape.masked > 0), shape.masked, shape.samples]
        first, ways, found = min(shape.prompt_keys, FIRST_PROMPT_KEYS), [(read, 0)], []
        if cached:
            first_time = min(shape.shared_beginnings, read)
            ways.append((first_time, read + cached - first_time))
        own, few = self.own_keys(shape), min(tokens, self.recordings.max_several)
        for memory, cache in ways:
            attention = [shape.prompt_pairs, shape.prompt_keys, 0.0]
            found.append((tokens, [memory, *keys, *attention, *rest, cache, float(beside), first]))
            if own:
                found.append((few, [memory, *keys, 0.0, 0.0, own, *rest, cache, 0.0, 0.0]))
        return found

    def host_seconds(self, shape: StepShape) -> float:
        """How long the host is busy with a step while nothing else can happen: scheduling, sending, committing."""
        step, sequence, prompt_token, sample, prompt_step, prompt = self._host  # type: ignore[attr-defined]
        seconds: float = step + sequence * (shape.decodes + shape.prompts) + sample * shape.samples
        if shape.prompts:
            seconds += prompt_step + prompt * shape.prompts + prompt_token * shape.prompt_tokens
        return seconds

    def for_model(
        self, old: Architecture, new: Architecture, itemsizes: tuple[int, int], rates: Mapping[str, float]
    ) -> "StepTime":
        """The same card with another model: each factor grows with the bytes or operations behind it.

        old, new: what a rank has of the measured and of the other model. itemsizes: bytes of a number, of both. rates:
        of the card, bytes_per_second and operations_per_second. They say how much of the table's time is reading the
        weights, and from which number of tokens on the products take longer than that.
        """
        before, after = Needs(old, itemsizes[0]), Needs(new, itemsizes[1])
        layers = new.num_hidden_layers / old.num_hidden_layers
        ratios = {
            "layers": layers,
            "keys": after.key_bytes / before.key_bytes,
            "pairs": after.pair_operations / before.pair_operations,
            "head": after.sample_operations / before.sample_operations,
            "vocabulary": new.vocab_size / old.vocab_size,
        }
        device = {name: self.device.get(name, 0.0) * ratios[kind] for name, kind in DEVICE_TERMS.items()}
        least = self.table[0][1]
        reading = min(least, before.weight_bytes / rates["bytes_per_second"])
        experts = reading * after.expert_bytes / before.weight_bytes
        read = reading * after.weight_bytes / before.weight_bytes - experts
        balance = rates["operations_per_second"] / rates["bytes_per_second"]
        knees = [
            round(balance * (n.weight_bytes - size * n.sample_operations / 2) / n.token_operations)  # without the head
            for n, size in zip((before, after), itemsizes, strict=True)
        ]
        # What a further token takes grows with its hidden states, and beyond the knee also with its products.
        states, products = layers * new.hidden_size / old.hidden_size, after.token_operations / before.token_operations
        start, knee = read + (least - reading) * layers, (knees[0], self.of_tokens(knees[0]))
        table = [(n, start + (seconds - least) * states) for n, seconds in self.table if n < min(knees)]
        table.append((knees[1], start + (knee[1] - least) * states))
        product = before.token_operations / rates["operations_per_second"]
        for (n, seconds), (m, more) in pairwise([knee, *(row for row in self.table if row[0] > knees[0])]):
            multiplying = min(more - seconds, (m - n) * product)
            grown = multiplying * products + (more - seconds - multiplying) * states
            table.append((table[-1][0] + m - n, table[-1][1] + grown))
        same = replace(self, table=tuple(table), device=device, launch=self.launch * layers)
        recordings = self.recordings.for_model(new, itemsizes[1])
        return replace(same, recordings=recordings, experts=experts, chosen_share=after.chosen_share)

    def with_all_reduces(self, model: Architecture, itemsize: int, seconds: float, per_byte: float) -> "StepTime":
        """With the sums over the ranks."""
        per_token = per_byte * model.hidden_size * itemsize
        sums = [model.num_all_reduces * (seconds + per_token * n) for n, _ in self.table]
        return replace(self, table=tuple((n, own + more) for (n, own), more in zip(self.table, sums, strict=True)))

    def as_json(self) -> dict[str, Any]:
        return {
            "table": [list(row) for row in self.table],
            "device": dict(self.device),
            "host": dict(self.host),
            "launch": self.launch,
            "cache_bytes": self.cache_bytes if math.isfinite(self.cache_bytes) else None,
            "recordings": asdict(self.recordings),
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "StepTime":
        sizes = {name: tuple(raw["recordings"][name]) for name in ("decodes", "prompts")}
        recordings = Recordings(**{**raw["recordings"], **sizes})
        table = tuple((int(n), float(seconds)) for n, seconds in raw["table"])
        # In a file without this factor, a shared key costs as much as any other.
        device = {"shared_key": raw["device"].get("decode_key", 0.0)} | raw["device"]
        cache_bytes = raw.get("cache_bytes") or math.inf
        return cls(table, device, raw["host"], raw["launch"], recordings, cache_bytes)


def line_at(rows: Sequence[tuple[int, float]], place: float) -> float:
    """The value at `place` of the lines through `rows`, which are not empty. Before the first row it is flat."""
    if len(rows) < 2 or place <= rows[0][0]:
        return rows[0][1]
    after = next((i for i, (n, _) in enumerate(rows) if place <= n), len(rows) - 1)
    (n, low), (m, high) = rows[after - 1], rows[after]
    return low + (place - n) * (high - low) / (m - n)
