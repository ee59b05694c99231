"""Start the engine's data plane on a GPU that this machine does not have, and see which kernels it launches.

Everything is real but the device: a tensor on the GPU is a tensor on PyTorch's "meta" device, which has a shape, a
dtype and a place in its storage, but no numbers. Triton's own code decides which variant of a kernel a launch needs.
Here the variant is noted and not compiled. Whoever wants to know more compiles it.

For a process of its own: the tests' process has Triton's interpreter switched on, which accepts much that a GPU does
not.
"""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.backends.compiler import GPUTarget

from nanovllm.config import EngineConfig
from nanovllm.distributed.group import Group
from nanovllm.graphs.cuda_graph import Recorder, Step
from nanovllm.kernels import has_fp8, precompile
from nanovllm.models.config import parse_config
from nanovllm.models.fp8_weights import fp8_transformer, is_projection
from nanovllm.models.loader import LoadedModel, dtype_in_use
from nanovllm.models.quantization import PER_CHANNEL
from nanovllm.models.transformer import Transformer
from nanovllm.runner.model_runner import ModelRunner

GPU = torch.device("cuda", 0)
KIB = 1024
# Shared memory that a program may have, by compute capability: CUDA Programming Guide, table "Technical Specifications
# per Compute Capability".
SHARED = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
SHARED_OF_SM = {75: 64, 80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}  # of a multiprocessor

_device_of, _is_cuda = Tensor.device.__get__, Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class OnMeta(TorchFunctionMode):
    """Puts on the "meta" device what is meant for the GPU; tensors there say that they are on the GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _device_of:
            return GPU if args[0].is_meta else func(*args)
        if func == _is_cuda:
            return args[0].is_meta
        if func is Tensor.data_ptr:  # storages are aligned, views need not be
            return args[0].storage_offset() * args[0].element_size()
        if func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.cuda:
            return torch.empty_like(args[0], device="meta")
        args, kwargs = tuple(map(self._placed, args)), {k: self._placed(v) for k, v in (kwargs or {}).items()}
        kwargs.pop("pin_memory", None)
        if func is Tensor.to and args[0].is_meta and "cpu" in args[1:]:
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        return func(*args, **kwargs)

    @staticmethod
    def _placed(argument: Any) -> Any:
        is_gpu = argument.type == "cuda" if isinstance(argument, torch.device) else argument == "cuda"
        return torch.device("meta") if is_gpu else argument


class Usage(NamedTuple):
    """What a program takes."""

    shared: int  # bytes
    registers: int  # of a thread
    threads: int
    stack: int  # bytes per thread, where registers are spilled to


class Variant(NamedTuple):
    """A kernel as a launch needs it: with its constants, the types of its arguments and what divides them."""

    source: Any
    target: GPUTarget
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.source.fn.__name__)

    @property
    def constants(self) -> dict[str, Any]:
        names = self.source.fn.arg_names
        return {names[path[0]]: value for path, value in self.source.constants.items()}

    def describe(self) -> str:
        """All that the variant depends on, in words."""
        warps, stages = self.options["num_warps"], self.options["num_stages"]
        divisible = sorted(path[0] for path, found in self.source.attrs.items() if found)
        types = [str(t) for t in self.source.signature.values() if t != "constexpr"]
        return f"{self.name} {self.constants} {warps=} {stages=} {types} {divisible}"

    def compile(self) -> Usage:
        """Compile down to machine code."""
        program = triton.compile(self.source, target=self.target, options=self.options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(program.asm["cubin"])
            file.flush()
            command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, stack, static = (int(re.findall(rf"{name}:(\d+)", said)[-1]) for name in ("REG", "STACK", "SHARED"))
        return Usage(max(program.metadata.shared, static), registers, 32 * program.metadata.num_warps, stack)


class AbsentGpu:
    """A GPU of this capability (major * 10 + minor), of which there is one per process. `noted`: variants so far, which
    are compiled if `compiles`. `launched`: the variants that were launched, one after the other."""

    def __init__(self, capability: int, compiles: bool = False) -> None:
        self.noted: list[Variant] = []
        self.launched: list[Variant] = []
        self.capability, self.sm_shared = divmod(capability, 10), SHARED_OF_SM[capability] * KIB
        target = GPUTarget("cuda", capability, 32)
        driver = SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        )
        triton.runtime.driver.set_active(driver)
        compile_now = triton.compiler.compile

        def note(source: Any, target: GPUTarget, options: dict[str, Any]) -> Any:
            self.noted.append(Variant(source, target, options))
            if compiles:
                compile_now(source, target=target, options=options)
            run = partial(self._launch, self.noted[-1])
            return SimpleNamespace(launch_metadata=lambda *_: None, run=run, function=None, packed_metadata=None)

        triton.compiler.compile = note
        if not compiles:  # nor in other processes, which a start asks for what is not in Triton's cache
            precompile.is_cached = lambda *_: True
        properties = SimpleNamespace(
            multi_processor_count=132,
            shared_memory_per_block_optin=SHARED[capability] * KIB,
            shared_memory_per_multiprocessor=self.sm_shared,
        )
        cuda: Any = torch.cuda
        cuda.get_device_capability = lambda device=None: self.capability
        cuda.get_device_properties = lambda device=None: properties
        cuda.synchronize = lambda device=None: None
        cuda.Event = lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: None)

    def _launch(self, variant: Variant, *arguments: Any) -> None:
        self.launched.append(variant)


def launched_and_recorded(step: Step) -> Step:
    """Stands in for a recorder: the step is launched once, and a replay launches nothing."""
    outputs = step()
    return lambda: outputs


def start(
    raw: dict[str, Any], layers: int = 2, recorder: Recorder = launched_and_recorded, left: Sequence[str] = (),
    **options: Any,
) -> ModelRunner:  # fmt: skip
    """A model of this config.json with so many layers, which rehearses and records all of its steps. In `OnMeta`.

    left: parts of names of weights that are not in FP8, if others are.
    """
    config = parse_config(raw | {"num_hidden_layers": layers}, "bfloat16")
    dtype = dtype_in_use(None, torch.bfloat16, GPU, exceeds_float16=config.gemma is not None)
    config = replace(config, dtype=dtype)
    length = config.max_position_embeddings
    resolved = EngineConfig(num_kv_blocks=1000, **options).resolve(on_gpu=True, model_max_len=length)
    assert resolved.max_model_len is not None
    said = config.quantization or (PER_CHANNEL if resolved.quantization else None)
    if said is not None and has_fp8(GPU):

        def is_fp8(name: str) -> bool:
            return is_projection(name) and not any(part in name for part in left)

        model = fp8_transformer(config, resolved.max_model_len, None, GPU, said.block, is_fp8)
    else:
        model = Transformer(config, resolved.max_model_len).to(GPU)
    loaded = LoadedModel(model.eval(), config, frozenset({1}), Path())
    group = Group(0, 1, GPU)
    group.smallest = lambda value: value  # type: ignore[method-assign]  # asks the device
    used = None if resolved.enforce_eager else recorder
    return ModelRunner(loaded, resolved, GPU, used, group, with_masks=True)
