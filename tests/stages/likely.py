"""Tests of one exercise, whose failures name the likely mistake, and what a learner reads of any failure.

`@exercise("4.2")` marks the tests of a hole: they run before all others, and say together whether it is filled well.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from tests.stages.subject import since
from tools.exercises.exercises import find_holes

T = TypeVar("T", bound=Callable[..., Any])
LONGEST_MESSAGE = 1200  # characters; what pytest tells of a comparison can be pages
SHAPES = (
    "scaled_dot_product_attention needs q, k and v as [.., heads, tokens, D], and enable_gqa=True if several query "
    "heads share a key/value head"
)
FREE_LIST = (
    "the free list is stage 3's OrderedDict, not a deque: popitem(last=False)[0] is its first block, taken out; "
    "pop(block, None) takes out any; free_list[block] = None puts one at the end"
)
HINTS = {  # what the failing line and the error have in them -> the likely mistake
    ("scaled_dot_product_attention", "size"): SHAPES,
    ("sample(", "cannot unpack non-iterable int"): "sample wants a row for each sequence: [1, V], as the logits are",
    ("append_token", "unhashable type: 'list'"): "sample returns a list, with one token per sequence",
    ("self.k[", "shape mismatch"): "split the first dimension alone: k.unflatten(0, (batch, num_queries))",
    ("block_table[", "list index out of range"): (
        "as many positions lie in one block as it has slots: the position divided by block_size is the index"
    ),
    ("k_blocks", "out of bounds"): "slots are rows of the flat view, k_blocks.flatten(0, 1)",
    ("parent", "int too big"): "a digest has 64 bits without a sign: parent.to_bytes(8, 'little')",
    ("bytes(", "range(0, 256)"): "a token needs more than a byte: array('q', tokens).tobytes()",
    ("block_by_digest[", "KeyError"): "no block is known under that digest: self.find(digest) is None then",
    (".matches", "'NoneType'"): "no content is known under this digest: stop before the comparison",
    (".digest", "'NoneType'"): "the first block has no parent, and 0 stands for the digest of none",
    ("array(", "greater than maximum"): "a vocabulary may have more than 65,536 tokens: array('q', tokens)",
    (".digest", "'int'"): "the parent is the content of the block before, not its digest",
    ("free_list", "OrderedDict' object has no attribute"): FREE_LIST,
    ("free_list[", "slice"): FREE_LIST,
    ("[block]", "not tuple"): "popitem gives a pair, of which the block is the first: popitem(last=False)[0]",
    ("free_list.pop(", "KeyError"): "a shared block that is in use is not in the free list: pop(block, None)",
    ("slots", "not a sequence"): "slots_of gives a list with a slot for each token: [0] is that of the first",
    ("gumbel(", "'Rows' object"): "the noise is drawn before the step: self.noise has it",
    ("context_lens", "size"): "lengths as a column, context_lens[:, None], beside the numbers of the slots [C]",
    ("[~", "shape mismatch"): "a value for each row, spread over its columns: torch.where(seen, slots, slots[:, :1])",
    ("hidden[", "out of bounds"): "hidden is [B, L, H]: a row and a column for each prompt, hidden[rows, last]",
    ("cache.", "'Masks' object"): "the mask follows from `positions` alone; `cache` is there for attention",
    (
        "rows.temperatures",
        "size",
    ): "each row has one temperature and one row of noise: take [:bucket], and make the temperatures a column [b, 1]",
    ("F.embedding", "index out of range"): "a row of another rank cannot be looked up here: look up row 0 in its place",
    ("copy_(", "must be Tensor, not list"): "copy_ takes a tensor, and this is a list: torch.tensor([...])",
    ("[:", "can't assign a list"): "a tensor takes a tensor, and this is a list: self.x.copy_(torch.tensor([...]))",
    ("multinomial", "probability tensor"): (
        "the draw is made already: self.noise, times the temperature, is added to the logits, and the largest wins"
    ),
    ("insort", "not supported between"): "what to compare: sequences have no order of their own, s.request has",
    ("copy_", "size"): "every field needs a value for each row of the bucket, padding included",
}


def exercise(name: str) -> Callable[[T], T]:
    """The test asks for nothing but what this exercise is about, and runs for its stage alone."""
    stage = int(name.split(".")[0])

    def mark(test: T) -> T:
        test.exercise = name  # type: ignore[attr-defined]
        return since(stage, stage)(test)

    return mark


def same(a: Any, b: Any) -> bool:
    """Equal; tensors of numbers up to rounding."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.is_floating_point() != b.is_floating_point():
            return False
        return torch.allclose(a, b, atol=1e-4, equal_nan=True) if a.is_floating_point() else torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.tolist()}" if value.numel() <= 32 else f"a tensor {list(value.shape)}"
    return repr(value)


def check(what: str, got: Any, expected: Any, likely: Mapping[str, Any] | None = None) -> None:
    """`got` is `expected`. If not, say which of `likely` it is: a mistake in words -> what that mistake gives."""
    __tracebackhide__ = True
    if same(got, expected):
        return
    told = f"{what}: {shown(got)} instead of {shown(expected)}"
    if isinstance(got, Tensor) and isinstance(expected, Tensor) and shown(got) == shown(expected):
        told = f"{what}: of the right shape, {list(got.shape)}, with wrong numbers in it"
    elif got is None:
        raise AssertionError(f"{what}: None\nlikely: a `return` is missing")
    elif isinstance(got, Tensor) and isinstance(expected, Tensor) and got.shape != expected.shape:
        told = f"{what}: of shape {list(got.shape)} instead of {list(expected.shape)}"
    cause = next((mistake for mistake, wrong in (likely or {}).items() if same(got, wrong)), None)
    raise AssertionError(told if cause is None else f"{told}\nlikely: {cause}")


# --- what a learner reads ---------------------------------------------------------------------------------------------


def hole_at(test: Any, traceback: TracebackType | None) -> str | None:
    """The exercise whose code failed, as far as the traceback leads into one; otherwise the one that is tested."""
    hole: str | None = getattr(test, "exercise", None)
    while traceback is not None:
        path, number = Path(traceback.tb_frame.f_code.co_filename), traceback.tb_lineno
        if path.parent.name == "exercises" and path.is_file():
            hole = hole_of_line(path.read_text(encoding="utf-8"), number) or hole
        traceback = traceback.tb_next
    return hole


def hole_of_line(source: str, number: int) -> str | None:
    holes = [hole.name for hole in find_holes(source) if hole.first < number <= hole.end]
    return holes[-1] if holes else None


def in_short(test: Any, error: BaseException, traceback: TracebackType | None) -> str:
    """What the test is about, the way through the learner's file, and what was wrong."""
    name = test.__name__.removeprefix("test_").replace("_", " ")
    lines = [f"{(test.__doc__ or name).strip().splitlines()[0]}\n"]
    hole = hole_at(test, traceback)
    at: list[str] = []
    while traceback is not None:
        path, number = Path(traceback.tb_frame.f_code.co_filename), traceback.tb_lineno
        if path.parent.name == "exercises" and path.is_file():
            source = path.read_text(encoding="utf-8")
            inside = hole_of_line(source, number)
            where = f"{path.parent.name}/{path.name}:{number}" + (f", in exercise {inside}" if inside else "")
            step = [f"  {where}", f"    {source.splitlines()[number - 1].strip()}"]
            if at[-2:] != step:  # up to Python 3.11 a comprehension is a call, of the same line
                at += step
        traceback = traceback.tb_next
    # pytest's "where" lines show whole objects: the values are in the line before them
    message = "\n".join(line for line in str(error).splitlines() if not (line.startswith(" +") and len(line) > 120))
    if len(message) > LONGEST_MESSAGE:
        message = f"{message[:LONGEST_MESSAGE]} …"
    if "likely: " in message:
        message = message.partition("\nassert ")[0].replace("\n  likely:", "\nlikely:")
    line = at[-1] if at else ""
    for (code, words), hint in HINTS.items():
        if code in line and words in f"{type(error).__name__}: {error}":
            message += f"\nlikely: {hint}"
    kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
    lines += [*at, f"{kind}{message}"]
    return "\n".join([f"exercise {hole}", *lines] if hole else lines)
