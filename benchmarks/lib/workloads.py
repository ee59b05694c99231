"""What is generated in a measurement, and by which model: requests of exact lengths, and random weights.

Both are made from a seed, so that every contender gets the same. The time of a step depends on how many tokens there
are, never on which. Random ids fit every model and share nothing by accident.

The headline workload is the one that the field quotes: 256 requests, 100 to 1024 tokens in, 100 to 1024 out. Prompts,
lengths and their order of drawing are those of nano-vllm's benchmark, so that figures can be put side by side.
"""

import random
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from stages.manifest import Chapter

SHAPES = Path(__file__).resolve().parents[1] / "shapes"
CHECKPOINTS = Path(__file__).resolve().parents[2] / "build" / "checkpoints"
BLOCK_SIZE = 16  # of every engine that has blocks


@dataclass(frozen=True)
class Request:
    """A prompt, and how many tokens are to be generated: exactly that many, whatever they are."""

    prompt: list[int]
    max_tokens: int

    @property
    def length(self) -> int:
        return len(self.prompt) + self.max_tokens


@dataclass(frozen=True)
class Scenario:
    """Calls of `generate`, one after another on one engine, and the limits that every contender keeps to.

    kv_slots: KV memory in tokens; None is as much as all requests of the largest call need at once.
    max_num_seqs: how many sequences may share a step, and rows a padded batch.
    """

    name: str
    calls: list[list[Request]]
    kv_slots: int | None = None
    max_num_seqs: int = 16

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Self:
        return cls(**{**raw, "calls": [[Request(**request) for request in call] for call in raw["calls"]]})

    @property
    def num_blocks(self) -> int:
        """The memory as blocks, for the stages that have a pool."""
        if self.kv_slots is not None:
            return self.kv_slots // BLOCK_SIZE
        return max(sum(-(-request.length // BLOCK_SIZE) for request in call) for call in self.calls)

    def num_rows(self, row_length: int) -> int:
        """The memory as rows of a rectangle, for stage 2 and Hugging Face; at least one, however long it is."""
        if self.kv_slots is None:
            return self.max_num_seqs
        return max(1, min(self.max_num_seqs, self.kv_slots // row_length))

    def limits(self, stage: Chapter) -> dict[str, int]:
        """The options of a stage's engine: the same memory as blocks, or as rows that can each hold the longest
        request."""
        limits = {"block_size": BLOCK_SIZE, "num_blocks": self.num_blocks, "max_num_seqs": self.max_num_seqs}
        if "num_blocks" not in stage.options:
            limits["max_num_seqs"] = self.num_rows(max(request.length for call in self.calls for request in call))
        return {name: value for name, value in limits.items() if name in stage.options}

    def warm_up(self, vocab_size: int) -> list[Request]:
        """The first call again with other prompts and two tokens each: shapes alike, nothing left to be found."""
        lengths = [len(request.prompt) for request in self.calls[0][: self.max_num_seqs]]
        return make_requests(((n, 2) for n in lengths), vocab_size, seed=2**32)


def make_requests(lengths: Iterable[tuple[int, int]], vocab_size: int, seed: int) -> list[Request]:
    """Requests with nothing in common; `lengths` are pairs (prompt tokens, tokens to generate)."""
    rng = random.Random(seed)
    return [Request([rng.randrange(vocab_size) for _ in range(prompt)], tokens) for prompt, tokens in lengths]


def mixed_lengths(
    count: int, prompt: tuple[int, int], output: tuple[int, int], seed: int, *, long_every: int = 0, long: int = 1
) -> list[tuple[int, int]]:
    """`count` pairs (prompt tokens, tokens to generate), uniform in the two ranges, ends included.

    Every `long_every`-th (0: none) is `long` times as long: most requests are short, and the few long ones decide
    what a static batch costs.
    """
    rng = random.Random(seed)
    pairs = []
    for i in range(count):
        factor = long if long_every and i % long_every == long_every - 1 else 1
        pairs.append((rng.randint(*prompt) * factor, rng.randint(*output) * factor))
    return pairs


def share_prefix(requests: list[Request], num_tokens: int, vocab_size: int, seed: int) -> list[Request]:
    """The same requests, all opening with the same `num_tokens` tokens in front of their own."""
    rng = random.Random(seed)
    prefix = [rng.randrange(vocab_size) for _ in range(num_tokens)]
    return [Request(prefix + request.prompt, request.max_tokens) for request in requests]


@dataclass(frozen=True)
class Sizes:
    """How much of the headline workload is drawn."""

    num_requests: int = 256
    shortest: int = 100
    longest: int = 1024
    highest_id: int = 10000


HEADLINE = Sizes()
QUICK = Sizes(num_requests=4, shortest=4, longest=12, highest_id=500)
TEMPERATURE = 0.6


def headline(number: int, sizes: Sizes = HEADLINE) -> tuple[list[list[int]], list[int]]:
    """Round `number` of the headline workload: prompts, and how many tokens each is to be given.

    All rounds have the same lengths. Round 0 has nano-vllm's token ids, the others fresh ones: a prefix cache never
    finds anything of an earlier round.
    """
    rng = random.Random(0)
    prompts = []
    for _ in range(sizes.num_requests):
        length = rng.randint(sizes.shortest, sizes.longest)
        prompts.append([rng.randint(0, sizes.highest_id) for _ in range(length)])
    max_tokens = [rng.randint(sizes.shortest, sizes.longest) for _ in range(sizes.num_requests)]
    if number:
        rng = random.Random(1000 + number)
        prompts = [[rng.randint(0, sizes.highest_id) for _ in prompt] for prompt in prompts]
    return prompts, max_tokens


def random_checkpoint(shape: str, directory: Path = CHECKPOINTS, vocab_size: int | None = None) -> Path:
    """Write (or find) the checkpoint `directory`/`shape`-random, in bfloat16, from a fixed seed: the time that a step
    takes does not depend on what its weights say. vocab_size: another than the shape's.

    Raises ValueError if there is no such shape in benchmarks/shapes.
    """
    if not (SHAPES / shape / "config.json").is_file():
        known = ", ".join(sorted(path.name for path in SHAPES.iterdir()))
        raise ValueError(f"there is no shape {shape!r} in benchmarks/shapes; there are {known}")
    target = directory / f"{shape}-{vocab_size or 'random'}"
    if target.is_dir():
        return target
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(SHAPES / shape, **({} if vocab_size is None else {"vocab_size": vocab_size}))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # a CPU takes a quarter of a minute for it
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    directory.mkdir(parents=True, exist_ok=True)
    # Renamed when it is whole: an interrupted run leaves nothing to be found, and two runs at once do not collide
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        model.save_pretrained(made := Path(scratch, target.name))
        put_in_place(made, target)
    return target


def put_in_place(made: Path, target: Path) -> None:
    """Rename a checkpoint that is whole. If another run was first with the same checkpoint, that one stays."""
    try:
        made.rename(target)
    except OSError:
        if not target.is_dir():
            raise
