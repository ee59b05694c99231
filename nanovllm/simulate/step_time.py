"""The time of a step from its counts: a sum of terms, each with a physical cause, and a floor.

The device reads the weights once per step (of a mixture of experts, the experts that its tokens choose), and the keys
of each decode. The layers' matrix products cost little per token as long as reading their weights takes longer, and
more beyond that *knee*. Attention of prompts takes as long as all pairs of a query and a key, or as walking through the
keys of the longest context, whichever takes longer. Drawing, verifying and masking cost per sequence. A step that was
recorded as a CUDA graph is padded to the next recorded size. A step with prompts that has no recording is launched
kernel by kernel, and takes no less than the launches do. All factors are at least 0 and all counts only grow with the
work. So more work never takes less time.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from nanovllm.simulate.needs import Architecture, Needs
from nanovllm.simulate.step_shape import StepShape

# Terms of the device, with what their factors grow with from one model to another
DEVICE_TERMS = {
    "step": "weights",  # reading the weights, and starting the kernels of each layer
    "token": "layers",  # of any kind, padding included
    "token_beyond_knee": "products",  # tokens beyond the knee, for which the products take longer than the weights
    "decode": "layers",
    "decode_key": "keys",
    "prompt_step": "layers",  # once, if there is any chunk of a prompt
    "prompt": "layers",
    "prompt_pair": "pairs",
    "sample": "head",
    "guess_step": "layers",  # once, if there is any guess
    "guess": "head",
    "masked_step": "layers",  # once, if there is any mask: the step is two recordings, and waits for the masks between
    "masked": "vocabulary",
    "prompt_key": "layers",  # of the longest context of a chunk: few programs walk through all of its keys
}
# Terms of the host: "prompt_step" once, if there is any chunk of a prompt; "prompt" for each chunk
HOST_TERMS = ("step", "sequence", "prompt_token", "sample", "prompt_step", "prompt")


@dataclass(frozen=True)
class Recordings:
    """Which steps are replayed as a CUDA graph (nanovllm/graphs/sizes.py). Without any, nothing is padded.

    decodes: numbers of tokens of the recordings of decodes, ascending; guesses count as tokens.
    prompts: the same of steps with prompts. max_sequences: that such a recording has room for, a row of padding
    included. max_operations: of the matrix products of a layer; a step with prompts that has more is not recorded.
    layer_operations: what a token needs of them, which depends on the model.
    """

    decodes: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()
    max_sequences: int = 0
    max_operations: float = 0.0
    layer_operations: float = 0.0

    def for_model(self, model: Architecture) -> "Recordings":
        return replace(self, layer_operations=2 * model.num_active_parameters / model.num_hidden_layers)

    @cached_property
    def largest(self) -> int:
        """Tokens of the largest recording of a step with prompts; 0 if there is none."""
        fitting = [n for n in self.prompts if n * self.layer_operations <= self.max_operations]
        return fitting[-1] if fitting else 0

    def run(self, shape: StepShape) -> tuple[int, bool]:
        """The tokens that are computed for a step, padding included, and whether it is launched kernel by kernel."""
        tokens = shape.decodes + shape.prompt_tokens + shape.guesses
        padded = padded_to(self.decodes, tokens)
        if not self.decodes or (not shape.prompts and tokens <= self.decodes[-1]):
            return padded, False
        # Rows that are launched one by one are not padded. They count as if they were, so that more work never counts
        # as less: what they cost is launching.
        padded = max(padded, padded_to(self.prompts, tokens))
        sequences = max(shape.decodes + shape.prompts + 1, shape.samples + shape.guesses)
        return padded, tokens > self.largest or sequences > self.max_sequences


def padded_to(sizes: tuple[int, ...], tokens: int) -> int:
    """The first of these sizes that is large enough; `tokens` itself beyond the last."""
    place = bisect_left(sizes, tokens)
    return sizes[place] if tokens and place < len(sizes) else tokens


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. `device` and `host` have a factor for each term, in seconds per count."""

    device: Mapping[str, float]
    host: Mapping[str, float]
    knee: int = 0  # tokens
    launch: float = 0.0  # seconds that launching a step kernel by kernel takes at least
    recordings: Recordings = field(default_factory=Recordings)
    experts: float = 0.0  # seconds that reading the weights of all experts takes; no card was measured with them
    chosen_share: float = 0.0  # of the experts, for each token

    def __post_init__(self) -> None:
        # Looked up once, not per step: a simulation has millions of them.
        object.__setattr__(self, "_device", tuple(self.device.get(name, 0.0) for name in DEVICE_TERMS))
        object.__setattr__(self, "_host", tuple(self.host.get(name, 0.0) for name in HOST_TERMS))

    def device_seconds(self, shape: StepShape) -> float:
        """How long the device is busy with a step."""
        return self._seconds(*self.recordings.run(shape), shape)

    def _seconds(self, tokens: int, launched: bool, shape: StepShape) -> float:
        factors: tuple[float, ...] = self._device  # type: ignore[attr-defined]
        seconds = factors[0] + factors[1] * tokens + factors[3] * shape.decodes + factors[4] * shape.decode_keys
        seconds += factors[8] * shape.samples
        if tokens > self.knee:
            seconds += factors[2] * (tokens - self.knee)
        if self.experts:
            seconds += self.experts * (1 - (1 - self.chosen_share) ** tokens)
        if shape.prompts:
            seconds += factors[5] + factors[6] * shape.prompts
            seconds += max(factors[7] * shape.prompt_pairs, factors[13] * shape.prompt_keys)
        if shape.guesses:
            seconds += factors[9] + factors[10] * shape.guesses
        if shape.masked:
            seconds += factors[11] + factors[12] * shape.masked
        return max(seconds, self.launch) if launched else seconds

    def host_seconds(self, shape: StepShape) -> float:
        """How long the host is busy with a step while nothing else can happen: scheduling, sending, committing."""
        step, sequence, prompt_token, sample, prompt_step, prompt = self._host  # type: ignore[attr-defined]
        seconds: float = step + sequence * (shape.decodes + shape.prompts) + sample * shape.samples
        if shape.prompts:
            seconds += prompt_step + prompt * shape.prompts + prompt_token * shape.prompt_tokens
        return seconds

    def counts(self, shape: StepShape) -> list[float]:
        """The counts of the device's terms, in the order of `DEVICE_TERMS`: what `fit` finds the factors of."""
        tokens, _ = self.recordings.run(shape)
        some = [float(n > 0) for n in (shape.prompts, shape.guesses, shape.masked)]
        beyond = max(0, tokens - self.knee)
        common = [1.0, tokens, beyond, shape.decodes, shape.decode_keys, some[0], shape.prompts, shape.prompt_pairs]
        return [*common, shape.samples, some[1], shape.guesses, some[2], shape.masked, shape.prompt_keys]

    def for_model(self, old: Architecture, new: Architecture, itemsizes: tuple[int, int], rate: float) -> "StepTime":
        """The same card with another model: each factor grows with the bytes or operations behind it.

        old, new: what a rank has of the measured and of the other model; itemsizes: bytes of a number, of both. rate:
        bytes per second of the card, which tells reading the weights from the rest of "step".
        """
        before, after = Needs(old, itemsizes[0]), Needs(new, itemsizes[1])
        layers = new.num_hidden_layers / old.num_hidden_layers
        ratios = {
            "layers": layers,
            "products": after.token_operations / before.token_operations,
            "keys": after.key_bytes / before.key_bytes,
            "pairs": after.pair_operations / before.pair_operations,
            "head": after.sample_operations / before.sample_operations,
            "vocabulary": new.vocab_size / old.vocab_size,
        }
        device = {name: self.device.get(name, 0.0) * ratios.get(kind, 1.0) for name, kind in DEVICE_TERMS.items()}
        step = self.device.get("step", 0.0)
        reading = min(step, before.weight_bytes / rate)
        experts = reading * after.expert_bytes / before.weight_bytes
        device["step"] = reading * after.weight_bytes / before.weight_bytes - experts + (step - reading) * layers
        launch, recordings, knee = self.launch * layers, self.recordings.for_model(new), self.knee
        if experts:  # a step reads more bytes for each operation, so the knee comes with more tokens
            bytes_of_token = [n.weight_bytes / n.token_operations for n in (before, after)]
            knee = round(knee * bytes_of_token[1] / bytes_of_token[0])
        same = replace(self, device=device, knee=knee, launch=launch, recordings=recordings)
        return replace(same, experts=experts, chosen_share=after.chosen_share)

    def with_all_reduces(self, model: Architecture, itemsize: int, seconds: float, per_byte: float) -> "StepTime":
        """With the sums over the ranks."""
        number = model.num_all_reduces
        device = dict(self.device)
        device["step"] = device.get("step", 0.0) + number * seconds
        device["token"] = device.get("token", 0.0) + number * per_byte * model.hidden_size * itemsize
        return replace(self, device=device)

    def as_json(self) -> dict[str, Any]:
        return {
            "device": dict(self.device),
            "host": dict(self.host),
            "knee": self.knee,
            "launch": self.launch,
            "recordings": asdict(self.recordings),
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "StepTime":
        sizes = {name: tuple(raw["recordings"][name]) for name in ("decodes", "prompts")}
        recordings = Recordings(**{**raw["recordings"], **sizes})
        return cls(raw["device"], raw["host"], raw["knee"], raw["launch"], recordings)
