"""What a GPU can do at best, measured: bytes a second of the best read kernel, operations a second of a matrix product.

Every share "of the limit" in the results is a share of these two numbers, taken in the same run on the same card.
"""

import statistics
from collections.abc import Callable

import torch
import triton
import triton.language as tl


def graph_microseconds(call: Callable[[], object], calls: int = 10, rounds: int = 7) -> float:
    """Median time of one `call` on the GPU: `calls` of them are replayed from a CUDA graph, without Python between."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # compiles what has to be compiled
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


@triton.jit
def _read_kernel(x_ptr, out_ptr, num_tiles, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros([TILE], tl.float32)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        total += tl.load(x_ptr + tile * TILE + tl.arange(0, TILE))
    tl.store(out_ptr + tl.program_id(0), tl.sum(total))


def read_bandwidth(gib: int = 2) -> float:
    """Bytes a second of reading `gib` GiB once: the best of a small sweep over tiles, warps and programs."""
    num_sms = torch.cuda.get_device_properties().multi_processor_count
    x = torch.rand(gib * 2**30 // 4, device="cuda")
    out = torch.empty(num_sms * 32, device="cuda")

    def microseconds(tile: int, num_warps: int, programs: int) -> float:
        def read() -> None:
            _read_kernel[(programs,)](x, out, x.numel() // tile, TILE=tile, num_warps=num_warps)

        return graph_microseconds(read, calls=3, rounds=5)

    tiles = (1024, 4), (2048, 4), (4096, 8), (8192, 8), (8192, 16)
    best = min(microseconds(*tile, num_sms * n) for tile in tiles for n in (4, 8, 16))
    return x.nbytes / best * 1e6


def matmul_rate(size: int = 8192) -> float:
    """Operations a second of a square bf16 matrix product of random numbers."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / graph_microseconds(lambda: torch.mm(a, b, out=out)) * 1e6
