"""Gluon as plain Python over PyTorch tensors, with barriers that behave as the GPU's; and the sides of `ring_decode`.

Triton's interpreter cannot run Gluon. What layouts do is left out here, and nothing else.
"""

import threading
import types
from typing import Any

import torch

from nanovllm.kernels.hopper import ring_decode as kernels


class Pointer:
    """Elements of a flat tensor from `offset` on; `offset` may be a tensor."""

    def __init__(self, flat: torch.Tensor, offset: Any = 0) -> None:
        self.flat, self.offset = flat, offset
        self.dtype = types.SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.flat, self.offset + more)


def load_elements(pointer: Pointer, mask: Any = None, other: float = 0.0) -> torch.Tensor:
    index = torch.as_tensor(pointer.offset)
    if mask is None:
        return pointer.flat[index].clone()
    index, mask = torch.broadcast_tensors(index, mask)
    return torch.where(mask, pointer.flat[torch.where(mask, index, 0)], other)


def store_elements(pointer: Pointer, value: torch.Tensor, mask: torch.Tensor) -> None:
    index, value, mask = torch.broadcast_tensors(pointer.offset, value, mask)
    pointer.flat[index[mask]] = value[mask]


class Barrier:
    """Of so many arrivals and any number of bytes; it counts its phases. Whoever arrives last gives memory up."""

    def __init__(self, *given_up: torch.Tensor, count: int = 1) -> None:
        self.changed, self.phase, self.bytes, self.arrived, self.count = threading.Condition(), 0, 0, 0, count
        self.given_up = given_up

    def happens(self, arrives: bool, more: int) -> None:
        with self.changed:
            self.arrived += arrives
            self.bytes += more
            assert self.arrived <= self.count  # nobody arrives twice in a phase
            if self.arrived == self.count and not self.bytes:
                for tile in self.given_up:  # anybody may write there from now on
                    tile.fill_(float("nan") if tile.is_floating_point() else -7)
                self.phase, self.arrived = self.phase + 1, 0
                self.changed.notify_all()

    def wait(self, parity: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: (self.phase - 1) % 2 == int(parity), timeout=20), "a deadlock"


class Memory:
    """A tile in shared memory, or several."""

    def __init__(self, tile: torch.Tensor) -> None:
        self.tile, self.dtype = tile, tile.dtype

    def index(self, i: Any) -> "Memory":
        return Memory(self.tile[int(i)])

    def slice(self, start: int, size: int) -> "Memory":
        return Memory(self.tile[start : start + size])

    def permute(self, order: tuple[int, ...]) -> "Memory":
        return Memory(self.tile.permute(order))

    def load(self, _: object) -> torch.Tensor:
        return self.tile.clone()

    def store(self, value: torch.Tensor) -> None:
        self.tile.copy_(value)


class Bars(list[Barrier]):
    def index(self, i: Any) -> Barrier:  # type: ignore[override]
        return self[int(i)]


BARRIERS = types.SimpleNamespace(
    wait=lambda bar, parity: bar.wait(parity),
    arrive=lambda bar: bar.happens(True, 0),
    expect=lambda bar, count: bar.happens(True, count),
)


class Cache:
    """What TMA reads [Hkv, 2 * slots, D], in fp32 though the kernel counts two bytes an element; of a cache in FP8 the
    words [Hkv, 2 * slots, D / 2] int16.

    Until somebody waits for the predecessor it holds what was there before the step.
    """

    def __init__(self, before: torch.Tensor, after: torch.Tensor) -> None:
        self.before, self.after = before, after
        self.early_boxes, self.waited = 0, False

    def wait(self) -> None:
        self.waited = True

    def bring(self, _: object, where: list[Any], bar: Barrier, memory: Memory) -> None:
        head, slot, _ = map(int, where)
        heads, keys, _ = memory.tile.shape
        self.early_boxes += not self.waited
        memory.tile.copy_((self.after if self.waited else self.before)[head : head + heads, slot : slot + keys])
        bar.happens(False, -2 * memory.tile.numel())


def numbers(words: torch.Tensor) -> torch.Tensor:
    """words [..., W] int16 -> the numbers in FP8 that they are made of [..., 2 W], in float32"""
    return words.contiguous().view(torch.float8_e4m3fn).float()


def widen_keys(words: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[HEADS, D / 2, KEYS] int16 -> twice the same shape, in the order that the kernel says"""
    fours = numbers(words.mT).unflatten(-1, (-1, 2, 2))  # [HEADS, KEYS, D / 4, first or second half, 2]
    return tuple(fours[..., half, :].flatten(-2).mT for half in (0, 1))


def widen_values(words: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return numbers(words)[..., ::2], numbers(words)[..., 1::2]


def tuple_of(*arguments: object) -> tuple[object, ...]:
    return arguments


def as_python(name: str, program: tuple[int, int], cache: Cache) -> Any:
    """A function of the kernel, for one program of the grid."""
    language = types.SimpleNamespace(
        arange=lambda first, last, _: torch.arange(first, last), load=load_elements, store=store_elements,
        program_id=lambda axis: program[axis],
        where=lambda c, x, y: torch.where(c, x, y), full=lambda shape, value, *_: torch.full(shape, value),
        zeros=lambda shape, *_: torch.zeros(shape), zeros_like=torch.zeros_like, exp2=torch.exp2,
        maximum=lambda x, y: torch.maximum(torch.as_tensor(x), torch.as_tensor(y)), minimum=torch.minimum,
        max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis),
        convert_layout=lambda x, _: x, int64=torch.int64, int32=torch.int32, float32=torch.float32, constexpr=Any,
        NVMMADistributedLayout=tuple_of, DotOperandLayout=tuple_of, SliceLayout=tuple_of,
    )  # fmt: skip
    names = {
        "gl": language, "mbarrier": BARRIERS, "tma": types.SimpleNamespace(async_copy_global_to_shared=cache.bring),
        "mma_v2": lambda a, b, acc: acc + a @ b, "float": float, "range": range, "gdc_wait": cache.wait,
        "widen_keys": widen_keys, "widen_values": widen_values, "in_fp16": lambda q: q,
    }  # fmt: skip
    names["_piece"] = types.FunctionType(kernels._piece.fn.__code__, names)
    return types.FunctionType(getattr(kernels, name).fn.__code__, names)
