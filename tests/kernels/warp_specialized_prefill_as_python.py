"""The kernel of `warp_specialized_prefill.py` as plain Python over PyTorch tensors: a thread for each group of warps.

See `gluon_as_python.py`. A product is computed when it is waited for, and what is given up becomes NaN: so it shows if
a place is given up too early, and so does a deadlock.
"""

import threading
import types
from typing import Any

import torch

from nanovllm.kernels.attention import paged_tile
from nanovllm.kernels.attention.paged_tile import LOG2_E
from nanovllm.kernels.hopper import warp_specialized_prefill as kernels
from nanovllm.kernels.hopper import warp_specialized_tile
from tests.kernels.attention_cases import Case
from tests.kernels.gluon_as_python import (
    BARRIERS,
    Barrier,
    Bars,
    Memory,
    Pointer,
    load_elements,
    store_elements,
    tuple_of,
)


class Product:
    def __init__(self, a: Any, b: Memory, acc: torch.Tensor, use_acc: bool = True, is_async: bool = False) -> None:
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc

    def value(self) -> torch.Tensor:
        a = self.a.tile if isinstance(self.a, Memory) else self.a
        return a @ self.b.tile + (self.acc if self.use_acc else 0)


def waited(_: int, parts: list[Any]) -> Any:
    values = [part.value() if isinstance(part, Product) else part for part in parts]
    return values[0] if len(values) == 1 else values


class Box:
    def __init__(self, source: torch.Tensor, rows: int) -> None:
        self.source, self.block_type = source, types.SimpleNamespace(shape=[rows, source.shape[1]])

    def bring(self, where: list[Any], bar: Barrier, memory: Memory) -> None:
        first, column = map(int, where)
        rows, columns = memory.tile.shape
        assert rows == self.block_type.shape[0]
        part = self.source[first : first + rows, column : column + columns]
        memory.tile.zero_()
        memory.tile[: part.shape[0]] = part
        bar.happens(False, -2 * memory.tile.numel())


def functions(program: int, programs: int, lock: Any) -> dict[str, Any]:
    def add(pointer: Pointer, value: int) -> int:
        with lock:
            index = int(pointer.offset)
            pointer.flat[index] += value
            return int(pointer.flat[index]) - value

    def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
        if mask is None:
            pointer.flat[int(pointer.offset)] = value
        else:
            store_elements(pointer, value, mask)

    def either(function: Any, plain: Any) -> Any:
        return lambda x, y: function(x, y) if isinstance(x, torch.Tensor) and x.ndim else plain(int(x), int(y))

    language = types.SimpleNamespace(
        arange=lambda first, last, _: torch.arange(first, last), load=load_elements, store=store, atomic_add=add,
        program_id=lambda _: program, num_programs=lambda _: programs, num_warps=lambda: 4, static_range=range,
        where=lambda c, x, y: torch.where(c, x, y), full=lambda shape, value, *_: torch.full(shape, value),
        zeros=lambda shape, *_: torch.zeros(shape), zeros_like=torch.zeros_like, exp2=torch.exp2,
        maximum=either(torch.maximum, max), minimum=either(torch.minimum, min), cdiv=lambda x, y: (int(x) + y - 1) // y,
        max=lambda x, axis: x.amax(axis), sum=lambda x, axis=0: x.sum(axis), cumsum=lambda x, axis=0: x.cumsum(axis),
        convert_layout=lambda x, _: x, int64=torch.int64, int32=torch.int32, float32=torch.float32, constexpr=Any,
        NVMMADistributedLayout=tuple_of, DotOperandLayout=tuple_of, SliceLayout=tuple_of, BlockedLayout=tuple_of,
    )  # fmt: skip
    names: dict[str, Any] = {
        "gl": language, "tl": language, "mbarrier": BARRIERS, "float": float, "range": lambda *a: range(*map(int, a)),
        "tma": types.SimpleNamespace(async_copy_global_to_shared=lambda d, *a: d.bring(*a)),
        "fence_async_shared": lambda: None, "warpgroup_mma": Product, "warpgroup_mma_wait": waited,
    }  # fmt: skip
    for module, of_module in (
        (kernels, ("_write_note", "_read_note", "_produce", "_consume")),
        (
            warp_specialized_tile,
            (
                "_softmax",
                "_zero_past_context",
                "_softmax_under_product",
                "only_tile",
                "first_two_tiles",
                "further_tiles",
            ),
        ),
        (paged_tile, ("locate",)),
    ):
        for name in of_module:
            names[name] = types.FunctionType(getattr(module, name).fn.__code__, names)
    return names


def emulate(case: Case, keys: int, stages: int, rows: int, programs: int, first_sequence: int = 0) -> torch.Tensor:
    """What so many programs, all at the same time, make of a case in fp32; what they do not write is NaN."""
    meta = case.meta
    _, num_blocks, block_size, heads, head_dim = case.kv.shape
    num_tokens, num_heads, _ = case.q.shape
    group = num_heads // heads
    out = torch.full_like(case.q, float("nan"))
    table, starts, context = (x[first_sequence:] for x in (meta.block_table, meta.query_start, meta.context_len))
    taken, lock = torch.zeros(2, dtype=torch.int32), threading.Lock()
    kv_box = Box(case.kv.view(-1, heads * head_dim), keys)
    q_box = Box(case.q.view(num_tokens, -1), min(rows, 2 * rows // group))
    failures: list[BaseException] = []

    def guarded(function: Any, *arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as failure:
            failures.append(failure)

    threads: list[tuple[Any, ...]] = []
    for program in range(programs):
        q, k, v = (torch.full((n, r, head_dim), float("nan")) for n, r in ((4, rows), (stages, keys), (stages, keys)))
        notes = torch.full((2 * kernels.NOTES, 1), -7, dtype=torch.int64)
        q_full, k_full, v_full = (Bars(Barrier() for _ in range(n)) for n in (2, stages, stages))
        half = kernels.NOTES
        q_free = Bars(Barrier(q[2 * i : 2 * i + 2], notes[half * i : half * i + half], count=2) for i in range(2))
        k_free, v_free = (Bars(Barrier(x[i], count=2) for i in range(stages)) for x in (k, v))
        places = Memory(q), Memory(k), Memory(v), Memory(notes), q_full, q_free, k_full, k_free, v_full, v_free
        names = functions(program, programs, lock)
        threads.append((
            names["_produce"], q_box, kv_box, *places, Pointer(taken), Pointer(table.flatten()), Pointer(starts),
            Pointer(context), len(context), num_blocks * block_size, table.shape[1],
            heads, group, head_dim, block_size, rows, keys, stages, kernels.NOTES, 32,
        ))  # fmt: skip
        for part in range(2):
            threads.append((
                names["_consume"], part, Pointer(out.flatten()), *places, case.scale * LOG2_E,
                heads, group, head_dim, rows, keys, stages, kernels.NOTES,
            ))  # fmt: skip
    running = [threading.Thread(target=guarded, args=arguments, daemon=True) for arguments in threads]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
    assert not failures, failures
    assert not any(thread.is_alive() for thread in running)
    assert not taken.any()  # ready for the next launch
    return out
