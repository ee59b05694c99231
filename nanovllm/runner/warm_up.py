"""Before the first request: kernels are compiled, by many processes at once, and each is launched.

A kernel is compiled when it is first launched, and no request should wait for that. So all that a runner records is
launched, and so is one step of each kind that is not recorded. Everything is done in the scratch row.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch.nn import ModuleList

from nanovllm.engine.plan import Scheduled
from nanovllm.kernels import why_no_kernels
from nanovllm.models.transformer import Transformer
from nanovllm.runner.batch import Batch, make_batch
from nanovllm.runner.draft import Guesses, let_go
from nanovllm.runner.rows import Rows

# Steps as they are launched without a recording, by the tokens of each sequence: one for each different set of kernels
# and compiled variants that such steps can need.
UNRECORDED = [
    (1,), (1, 32), (32,), (17,) * 33, (1,) * 16, (1,) * 33, (2,), (2,) * 16, (2,) * 33, (17,), (65,), (129,),
    (700, 700),
]  # fmt: skip


def launch_unrecorded(compute: Callable[[Batch], object], rows: Rows, max_num_tokens: int) -> None:
    """Compute one step of each kind in `UNRECORDED`, except those that the configuration does not allow."""
    for lengths in UNRECORDED:
        work = [
            Scheduled(-1, rows.scratch_row, 0, min(n, rows.max_context_len), sample=True, new_blocks=())
            for n in lengths
        ]
        if len(work) <= rows.scratch_row and sum(s.num_tokens for s in work) <= max_num_tokens:
            compute(make_batch(work, rows))


def compile_kernels(
    prepare: Callable[[], tuple[object, Guesses]],
    models: Sequence[Transformer],
    device: torch.device,
    num_ranks: int,
) -> None:
    """Have the kernels compiled that `prepare` would launch, if Triton's cache lacks them. None of them is launched.

    prepare: what the start is about to do; the guesses that it returns are let go. models: what it computes with.
    num_ranks: how many processes start on this host.
    """
    if why_no_kernels(device) is not None:
        return
    from nanovllm.kernels.precompile import compiled_together, num_processes

    processes = num_processes(num_ranks)
    if processes < 2:
        return
    with compiled_together(processes), ExitStack() as stack:
        for model in models:
            stack.enter_context(shortened(model))
        _, guesses = prepare()
    let_go(guesses)


@contextmanager
def shortened(model: Transformer) -> Iterator[None]:
    """Within this context the model has two layers of each window that it has. A step then launches the same kernels as
    with all layers: those after the first, which has no residual and the plan of attention just before it, are
    alike."""
    layers, windows = model.layers, model.config.windows
    model.layers = ModuleList(layer for i, layer in enumerate(layers) if windows[:i].count(windows[i]) < 2)
    try:
        yield
    finally:
        model.layers = layers
