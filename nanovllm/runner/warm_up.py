"""Before the first request: a rehearsal. Kernels are compiled, by many processes at once, and each is launched.

At its first launch a kernel is compiled and loaded, and a library sets itself up. No request should wait for that, and
no recording survives it. So the rehearsal launches every step that a runner is about to record, and one step of each
kind that is not recorded. All these steps are computed in the scratch row, with few layers.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import torch
from torch.nn import ModuleList

from nanovllm.distributed.group import Group
from nanovllm.engine.plan import Scheduled
from nanovllm.graphs.sizes import LONG_CONTEXT
from nanovllm.kernels import fused_kernels, why_no_kernels
from nanovllm.models.transformer import Transformer
from nanovllm.runner.batch import Batch, make_batch
from nanovllm.runner.draft import Guesses, let_go
from nanovllm.runner.rows import Rows
from nanovllm.startup import part_of_start

# Steps as they are launched without a recording, by the tokens of each sequence: one for each different set of kernels
# and compiled variants that such steps can need.
UNRECORDED = [
    (1,), (1, 1), (1, 32), (32,), (17,) * 33, (1,) * 8, (1,) * 16, (1,) * 33, (1,) * 64, (2,), (4,), (8,), (16,),
    (2,) * 8, (2,) * 16, (2,) * 33, (2,) * 64, (17,), (65,), (129,), (256,),
]  # fmt: skip
# The last kind has as many tokens as the configuration allows, up to the first number, and sequences as long, up to the
# second: a large step for every kernel
LARGE_STEP, LONG_SEQUENCE = 1400, 700


def launch_unrecorded(compute: Callable[[Batch], object], rows: Rows, max_num_tokens: int) -> None:
    """Compute one step of each kind in `UNRECORDED`, except those that the configuration does not allow, a large one,
    and two with a long context."""
    length, num_tokens = min(LONG_SEQUENCE, rows.max_context_len), min(LARGE_STEP, max_num_tokens)
    large = tuple(min(length, num_tokens - start) for start in range(0, num_tokens, length))
    kinds = [[(0, min(n, rows.max_context_len)) for n in of] for of in (*UNRECORDED, large[: rows.scratch_row])]
    if (room := min(rows.max_context_len - LONG_CONTEXT, max_num_tokens)) > 1:
        # Of a few tokens alone the decode kernel would take care
        kinds += [[(LONG_CONTEXT, min(17, room))], [(LONG_CONTEXT, 2), (0, 17)]]
    for chunks in kinds:
        work = [Scheduled(-1, rows.scratch_row, start, n, sample=True, new_blocks=()) for start, n in chunks]
        if len(work) <= rows.scratch_row and sum(s.num_tokens for s in work) <= max_num_tokens:
            compute(make_batch(work, rows))


def import_beside(device: torch.device) -> None:
    """Import Triton and our kernels in a thread of their own, if `device` can run them. Meanwhile the start goes on:
    the driver makes a context, and weights are read."""
    if why_no_kernels(device) is None:
        threading.Thread(target=_import_kernels, args=(device,), name="nanovllm-import").start()


def _import_kernels(device: torch.device) -> None:
    with suppress(Exception):  # the same error comes again where the kernels are used
        fused_kernels(device)
        from nanovllm.attention import triton_backend
        from nanovllm.kernels import precompile

        triton_backend.hopper_kernels(device)
        precompile.hash_triton()


def rehearse(
    recording: Callable[[], tuple[object, Guesses]],
    unrecorded: Callable[[], None],
    models: Sequence[Transformer],
    group: Group,
) -> None:
    """Have all kernels compiled and launched that are needed later.

    recording: prepares all recordings with a recorder that only launches; the guesses that it returns are let go.
    unrecorded: launches the other kinds of steps. models: what both of these compute with. group: of this rank.
    """

    def rehearsal() -> None:
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(shortened(model))
            _, guesses = recording()
            unrecorded()
        let_go(guesses)

    with part_of_start("compilation"):
        is_done = compile_kernels(rehearsal, group)
    with part_of_start("rehearsal"):
        if not is_done:
            rehearsal()


def compile_kernels(rehearsal: Callable[[], None], group: Group) -> bool:
    """Have the kernels compiled that `rehearsal` would launch, if Triton's cache lacks them. Returns whether the cache
    lacked none and `rehearsal` has launched them all.

    group: of this rank. Of several ranks none launches: their kernels wait for each other, and one rank may find in the
        cache what another has just missed. All of them rehearse, or none, since a rehearsal has collectives.
    """
    if why_no_kernels(group.device) is not None:
        return False
    from nanovllm.kernels.precompile import compiled_together, num_processes

    # The smallest of all ranks: each may be bound to other cores
    processes, launching = group.smallest(num_processes(group.size)), group.size == 1
    if processes < 2:
        return False
    with compiled_together(processes, launching) as missing:
        rehearsal()
    return launching and not missing


@contextmanager
def shortened(model: Transformer) -> Iterator[None]:
    """Within this context the model has two layers of each kind, or one if the kind has no more.

    A step then launches the same kernels, on the same shapes, as with all layers. Two are needed, because the first
    layer of a kind can differ from the others: the model's first layer has no residual, and the plan of attention is
    launched just before the first layer with each window. A checkpoint in FP8 may leave some layers out, so a kind is
    told by all the modules that a layer consists of. It is also told by those of the layer before, which may leave its
    result in several parts.
    """
    layers = model.layers
    parts = [[type(module) for module in layer.modules()] for layer in layers]
    kinds = list(zip([parts[0], *parts], parts, model.config.windows, strict=False))
    chosen: list[int] = []
    for i, kind in enumerate(kinds):
        if kinds[:i].count(kind) < 2:
            if chosen and parts[chosen[-1]] != parts[i - 1]:
                chosen.append(i - 1)
            chosen.append(i)
    model.layers = ModuleList(layers[i] for i in chosen)
    try:
        yield
    finally:
        model.layers = layers
