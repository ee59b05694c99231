"""Who may import whom, asserted from the imports; each rule is shown to bite on a small planted source.

Two more tests import for real: with torch hidden, everything of the control plane; with Triton hidden, everything
that has to work on a machine that has none (macOS, Windows).
"""

import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.imports import Sources, inside

ROOT = Path(__file__).resolve().parent.parent


@cache
def repository() -> Sources:
    return Sources.read(ROOT, "stages", "nanovllm", "benchmarks", "tools", "training")


# What offers the engine to users: requests, text and their outputs.
FRONT = tuple(f"nanovllm.{name}" for name in ("llm", "async_llm", "cli", "server", "outputs", "text"))
# What may name the kernels that only Hopper can run: those who choose a kernel.
CHOOSES_FOR_HOPPER = ("nanovllm.attention.triton_backend", "nanovllm.kernels.linear", "nanovllm.kernels.launch")
# Loaded on demand only, by the machine that can use them.
BACKENDS_ON_TRITON = ("nanovllm.attention.triton_backend", "nanovllm.attention.flash_attn")


def is_kernels(module: str) -> bool:
    return module.startswith("nanovllm.kernels.") or bool(re.fullmatch(r"stages\.\w+_triton", module))


def stage_number(module: str) -> int | None:
    found = re.fullmatch(r"stages\.stage_(\d+)_\w+", module)
    return int(found[1]) if found else None


def is_elective(module: str) -> bool:
    return module.startswith("stages.electives.")


def stages_and_engine_are_strangers(sources: Sources) -> list[str]:
    found = [str(i) for i in sources.all_imports("stages") if i.of("nanovllm")]
    return found + [str(i) for i in sources.all_imports("nanovllm") if i.of("stages")]


def a_stage_imports_only_earlier_ones(sources: Sources) -> list[str]:
    """And what all stages share imports none of them."""
    found = []
    for statement in sources.all_imports("stages"):
        target, own = stage_number(statement.target), stage_number(statement.module)
        if target is not None and (own is None or target >= own) and not is_elective(statement.module):
            found.append(str(statement))
    return found


def an_elective_stands_on_stage_5(sources: Sources) -> list[str]:
    """And on what that stands on, but on no other elective; and no stage stands on an elective."""
    imports = list(sources.all_imports("stages"))
    found = [str(i) for i in imports if is_elective(i.module) and (stage_number(i.target) or 0) > 5]
    return found + [str(i) for i in imports if is_elective(i.target)]


def a_reader_holds_two_classes_at_most(sources: Sources) -> list[str]:
    """A stage's class may extend a class of `stages/` only if that one extends nothing of `stages/`."""
    classes = sources.classes()
    ours = {name: [b for b in bases if b in classes] for name, bases in classes.items() if inside(name, "stages")}
    return [
        f"{name} extends {base}, which extends {', '.join(ours[base])}"
        for name, bases in ours.items()
        for base in bases
        if ours.get(base)
    ]


def no_import_goes_round_in_a_circle(sources: Sources) -> list[str]:
    """Every import counts, also one in a function and one for types only."""
    return [f"a circle: {' -> '.join(circle)}" for circle in sources.circles()]


def the_control_plane_is_pure_python(sources: Sources) -> list[str]:
    """`engine/` reaches nothing but the standard library and xxhash, not even in a function: a browser runs it."""
    allowed = sys.stdlib_module_names | {"xxhash", "nanovllm"}
    return _reached(sources, "nanovllm.engine", lambda name: name.split(".")[0] not in allowed)


def text_has_no_torch(sources: Sources) -> list[str]:
    """Nothing that `text/` can reach brings torch in: the server's API processes do without."""
    return _reached(sources, "nanovllm.text", lambda name: inside(name, "torch", "triton"))


def the_server_has_no_torch(sources: Sources) -> list[str]:
    """But in the engine's process, which imports it when it makes the engine."""
    return [
        f"{module} loads {via}"
        for module in sources.trees
        if inside(module, "nanovllm.server")
        for name, via in sources.loads(module).items()
        if via is not None and inside(name, "torch", "triton")
    ]


def the_simulation_has_no_torch(sources: Sources) -> list[str]:
    """Nothing that `simulate/` can reach brings torch in: a fleet is simulated on any laptop. Of the engine's users it
    needs none, since it is one itself."""
    found = _reached(sources, "nanovllm.simulate", lambda name: inside(name, "torch", "triton"))
    front = [i for i in sources.all_imports("nanovllm.simulate") if i.of("nanovllm.llm", "nanovllm.async_llm")]
    return found + [str(i) for i in front]


def _reached(sources: Sources, package: str, forbidden: Callable[[str], bool]) -> list[str]:
    """What the modules of a package reach of what is forbidden, by any import."""
    return [
        f"{module} loads {via}"
        for module in sources.trees
        if inside(module, package)
        for name, via in sources.loads(module, lazily_too=True).items()
        if via is not None and forbidden(name)
    ]


def the_data_plane_knows_no_requests(sources: Sources) -> list[str]:
    """Below the workers there are no requests and no text. Of the control plane there is the plan of a step."""
    imports = sources.all_imports("nanovllm.runner", "nanovllm.graphs", "nanovllm.sampling")
    foreign = ("nanovllm.engine", "nanovllm.workers", "tokenizers", "transformers", *FRONT)
    return [str(i) for i in imports if i.of(*foreign) and not i.of("nanovllm.engine.plan")]


def sampling_and_graphs_know_no_runner(sources: Sources) -> list[str]:
    return [str(i) for i in sources.all_imports("nanovllm.sampling", "nanovllm.graphs") if i.of("nanovllm.runner")]


def collectives_lie_below_the_layers(sources: Sources) -> list[str]:
    """And processes above the runner: only who makes an engine knows them."""
    above = ("nanovllm.layers", "nanovllm.models", "nanovllm.runner", "nanovllm.graphs", "nanovllm.workers", *FRONT)
    found = [str(i) for i in sources.all_imports("nanovllm.distributed") if i.of(*above)]
    own = ("nanovllm.workers", "nanovllm.llm", "benchmarks", "tools")
    return found + [str(i) for i in sources.all_imports() if i.of("nanovllm.workers") and not inside(i.module, *own)]


def only_a_choice_names_hopper(sources: Sources) -> list[str]:
    """`kernels/hopper/` can be deleted: nobody imports from it but itself and those who choose a kernel, lazily."""
    hopper = "nanovllm.kernels.hopper"
    imports = [i for i in sources.all_imports("nanovllm") if i.of(hopper) and not inside(i.module, hopper)]
    return [str(i) for i in imports if i.on_load or not inside(i.module, *CHOOSES_FOR_HOPPER)]


def models_know_only_the_attention_interface(sources: Sources) -> list[str]:
    imports = sources.all_imports("nanovllm.layers", "nanovllm.models")
    foreign = ("nanovllm.attention", "nanovllm.engine", "nanovllm.runner", "nanovllm.sampling_params", *FRONT)
    return [str(i) for i in imports if i.of(*foreign) and not i.of("nanovllm.attention.interface")]


def triton_is_imported_lazily(sources: Sources) -> list[str]:
    """Only kernel modules import Triton, and nothing but a kernel or a backend loads one when it is itself imported."""
    imports = sources.all_imports("stages", "nanovllm")
    found = [str(i) for i in imports if i.of("triton") and not is_kernels(i.module)]
    for module in sources.trees:
        if inside(module, "stages", "nanovllm") and not is_kernels(module) and module not in BACKENDS_ON_TRITON:
            reached = sources.loads(module).items()
            found += [f"{module} loads {via}" for name, via in reached if inside(name, "triton") and via]
    return found


Rule = Callable[[Sources], list[str]]
RULES: list[Rule] = [
    stages_and_engine_are_strangers,
    a_stage_imports_only_earlier_ones,
    an_elective_stands_on_stage_5,
    a_reader_holds_two_classes_at_most,
    no_import_goes_round_in_a_circle,
    the_control_plane_is_pure_python,
    text_has_no_torch,
    the_server_has_no_torch,
    the_simulation_has_no_torch,
    the_data_plane_knows_no_requests,
    sampling_and_graphs_know_no_runner,
    collectives_lie_below_the_layers,
    only_a_choice_names_hopper,
    models_know_only_the_attention_interface,
    triton_is_imported_lazily,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_repository_obeys(rule: Rule) -> None:
    assert rule(repository()) == []


def test_the_repository_was_read() -> None:
    for module in ("stages.core", "nanovllm.engine.scheduler", "nanovllm.runner.model_runner", "nanovllm.models"):
        assert module in repository().trees
    assert repository().imports["stages.core"], "a module without a single import would obey any rule"


OUTSIDE = stages_and_engine_are_strangers
EARLIER = a_stage_imports_only_earlier_ones
ELECTIVE = an_elective_stands_on_stage_5
CLASSES = a_reader_holds_two_classes_at_most
CIRCLE = no_import_goes_round_in_a_circle
CONTROL = the_control_plane_is_pure_python
TEXT = text_has_no_torch
SERVER = the_server_has_no_torch
SIMULATION = the_simulation_has_no_torch
BELOW = sampling_and_graphs_know_no_runner
COLLECTIVES = collectives_lie_below_the_layers
HOPPER = only_a_choice_names_hopper
DATA = the_data_plane_knows_no_requests
MODELS = models_know_only_the_attention_interface
LAZY = triton_is_imported_lazily

# rule, sources that break it, what each complaint says
PLANTED: list[tuple[Rule, dict[str, str], str]] = [
    (OUTSIDE, {"stages.a": "def f():\n    from nanovllm.config import X"}, "nanovllm.config"),
    (OUTSIDE, {"stages.a": "import importlib\nimportlib.import_module('nanovllm')"}, "nanovllm"),
    (OUTSIDE, {"nanovllm.a": "import stages.core as c"}, "stages.core"),
    (EARLIER, {"stages.stage_2_b": "from .stage_3_c import X", "stages.stage_3_c": ""}, "stage_3_c"),
    (EARLIER, {"stages.core": "from stages import stage_1_a", "stages.stage_1_a": ""}, "stage_1_a"),
    (ELECTIVE, {"stages.electives.a": "from stages.stage_6_c import X", "stages.stage_6_c": ""}, "stage_6_c"),
    (ELECTIVE, {"stages.electives.a": "from stages.electives.b import X", "stages.electives.b": ""}, "electives.b"),
    (ELECTIVE, {"stages.stage_7_a": "import stages.electives.b", "stages.electives.b": ""}, "electives.b"),
    (
        CLASSES,
        {
            "stages.a": "class A: ...",
            "stages.b": "from stages.a import A as First\nclass B(First): ...",
            "stages.c": "import stages.b\nclass C(stages.b.B): ...",
        },
        "stages.c.C extends stages.b.B, which extends stages.a.A",
    ),
    (
        CLASSES,
        {"stages.a": "class A(Generic[T]): ...\nclass B(A[int]): ...\nclass C(B): ..."},
        "stages.a.C extends stages.a.B",
    ),
    (CONTROL, {"nanovllm.engine.a": "def f():\n    import torch.nn"}, "torch.nn"),
    (CONTROL, {"nanovllm.engine.a": "if TYPE_CHECKING:\n    from torch import Tensor"}, "torch"),
    (
        CONTROL,
        {"nanovllm.engine.a": "from ..config import C", "nanovllm.config": "try:\n    import torch\nexcept E: ..."},
        "nanovllm.engine.a loads nanovllm.config:2 imports torch",
    ),
    (CONTROL, {"nanovllm.engine.a": "import numpy"}, "numpy"),
    (CIRCLE, {"nanovllm.a": "import nanovllm.b", "nanovllm.b": "def f():\n    import nanovllm.a"}, "nanovllm.b"),
    (
        CIRCLE,
        {
            "tools.a": "from tools import b",
            "tools.b": "from tools.c import C",
            "tools.c": "if TYPE_CHECKING:\n    from tools.a import A",
        },
        "tools.a",
    ),
    (TEXT, {"nanovllm.text.a": "def f():\n    from nanovllm.b import B", "nanovllm.b": "import torch"}, "torch"),
    (SERVER, {"nanovllm.server.a": "from nanovllm.b import B", "nanovllm.b": "import torch"}, "torch"),
    (
        SIMULATION,
        {"nanovllm.simulate.a": "def f():\n    from nanovllm.b import B", "nanovllm.b": "import torch"},
        "torch",
    ),
    (SIMULATION, {"nanovllm.simulate.a": "from nanovllm.llm import LLM", "nanovllm.llm": ""}, "nanovllm.llm"),
    (BELOW, {"nanovllm.sampling.a": "from nanovllm.runner.rows import Rows"}, "runner.rows"),
    (BELOW, {"nanovllm.graphs.a": "if TYPE_CHECKING:\n    from nanovllm.runner import model_runner"}, "runner"),
    (COLLECTIVES, {"nanovllm.distributed.a": "from nanovllm.layers.linear import Linear"}, "layers.linear"),
    (COLLECTIVES, {"nanovllm.runner.a": "from nanovllm.workers.team import Team"}, "workers.team"),
    (HOPPER, {"nanovllm.kernels.attention.a": "def f():\n    import nanovllm.kernels.hopper.ring"}, "hopper.ring"),
    (HOPPER, {"nanovllm.attention.triton_backend": "from nanovllm.kernels.hopper.ring import r"}, "hopper.ring"),
    (DATA, {"nanovllm.runner.a": "from nanovllm.engine.request import R"}, "engine"),
    (DATA, {"nanovllm.graphs.a": "from nanovllm.workers.executor import E"}, "workers"),
    (DATA, {"nanovllm.runner.a": "from transformers import AutoTokenizer"}, "transformers"),
    (DATA, {"nanovllm.runner.a": "from nanovllm.outputs import R"}, "outputs"),
    (MODELS, {"nanovllm.models.a": "from nanovllm.attention import select"}, "attention"),
    (MODELS, {"nanovllm.layers.a": "import nanovllm.runner.rows"}, "runner.rows"),
    (LAZY, {"nanovllm.layers.a": "def f():\n    import triton"}, "triton"),
    (
        LAZY,
        {"nanovllm.attention.a": "from nanovllm.kernels import b", "nanovllm.kernels.b": "import triton"},
        "nanovllm.attention.a loads nanovllm.kernels.b:1 imports triton",
    ),
    (
        LAZY,
        {"stages.a": "if LINUX:\n    import stages.b_triton", "stages.b_triton": "import triton.language as tl"},
        "stages.a loads stages.b_triton:1",
    ),
]


@pytest.mark.parametrize(("rule", "texts", "complaint"), PLANTED, ids=lambda value: getattr(value, "__name__", ""))
def test_the_rule_bites(rule: Rule, texts: dict[str, str], complaint: str) -> None:
    found = rule(Sources(texts))
    assert found and all(complaint in line for line in found), found


def test_what_is_allowed_passes() -> None:
    sources = Sources(
        {
            "stages.core": "class Engine(Protocol[T]): ...",
            "stages.stage_1_a": "from stages.core import Engine\nclass A(Engine): ...\nclass B(nn.Module): ...",
            "stages.stage_2_b": "from stages.stage_1_a import B\nclass C(B): ...\ndef f():\n    import stages.k_triton",
            "stages.electives.d": "from stages.stage_5_e import E\nfrom stages.stage_1_a import A\nclass D(E): ...",
            "stages.stage_5_e": "class E: ...",
            "stages.k_triton": "import triton",
            "nanovllm.config": "def f():\n    import json",
            "nanovllm.engine.plan": "from nanovllm.config import C",
            "nanovllm.runner.a": "import torch\nfrom nanovllm.engine.plan import P\nimport nanovllm.attention",
            "nanovllm.models.a": "from nanovllm.attention.interface import AttentionBackend",
            "nanovllm.attention": "def f():\n    from nanovllm.attention.triton_backend import T",
            "nanovllm.attention.triton_backend": "from nanovllm.kernels.b import kernel",
            "nanovllm.kernels.b": "import triton",
        },
        packages=frozenset({"nanovllm.attention"}),
    )
    assert {rule.__name__: rule(sources) for rule in RULES} == {rule.__name__: [] for rule in RULES}


def import_all(modules: list[str], hidden: str) -> subprocess.CompletedProcess[str]:
    """Import the modules in a fresh process where `hidden` cannot be imported."""
    script = "import sys\nsys.modules[sys.argv[1]] = None\nfor name in sys.argv[2:]: __import__(name)"
    return subprocess.run([sys.executable, "-c", script, hidden, *modules], cwd=ROOT, capture_output=True, text=True)


def test_the_control_plane_imports_without_torch() -> None:
    modules = [name for name in repository().trees if inside(name, "nanovllm.engine")]
    done = import_all(modules, hidden="torch")
    assert done.returncode == 0, done.stderr


def test_all_but_the_kernels_imports_without_triton() -> None:
    ours = [name for name in repository().trees if inside(name, "stages", "nanovllm")]
    modules = [name for name in ours if not is_kernels(name) and name not in BACKENDS_ON_TRITON]
    done = import_all(modules, hidden="triton")
    assert done.returncode == 0, done.stderr
