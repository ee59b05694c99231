"""The elective on FP8: each of its parts, then the tokens of Hugging Face's model with what eight bits leave of its
weights, and what that costs on stories."""

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stages.stage_3_paged_blocks import Batch
from tests import oracle
from tests.electives.subject import ElectiveSubject, make_subject
from tests.oracle_record import record_alone
from tests.stages import conformance
from tests.stages.conformance import Conformance, run
from tests.stages.requests import PROMPTS, TIGHT, greedy, random_prompts
from tests.weights import lively_qwen3, random_llama, random_qwen2

STORY_MODEL = Path(__file__).parents[2] / "assets" / "story_model"
KINDS = ("tensor", "channel", "block")
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SLOW = pytest.mark.slow
Build = Callable[..., Path]


# --- what is right, by PyTorch's own e4m3 and one block after the other ---


def rounded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """What e4m3 leaves of a matrix of which `rows` x `columns` share a scale."""
    out = torch.empty_like(matrix)
    for i in range(0, matrix.shape[0], rows):
        for j in range(0, matrix.shape[1], columns):
            part = matrix[i : i + rows, j : j + columns]
            scale = part.abs().max() / 448
            out[i : i + rows, j : j + columns] = (part / scale).to(torch.float8_e4m3fn).float() * scale
    return out


def block_of(kind: str, weight: Tensor) -> tuple[int, int]:
    rows, columns = weight.shape
    return {"tensor": (rows, columns), "channel": (1, columns), "block": (128, 128)}[kind]


ORIGINAL: dict[Path, Path] = {}  # a checkpoint of rounded weights -> the one that an engine is to quantise itself


def round_checkpoint(original: Path, target: Path, kind: str) -> Path:
    if not target.exists():
        shutil.copytree(original, target)
        tensors = {name: tensor.float() for name, tensor in load_file(target / "model.safetensors").items()}
        for name, weight in tensors.items():
            if name.split(".")[-2] in LINEARS and weight.dim() == 2:
                tensors[name] = rounded(weight, *block_of(kind, weight))
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
    ORIGINAL[target] = original
    return target


def rounding(build: Build, kind: str) -> Build:
    """The checkpoints of `build` with what FP8 leaves of their weights, in float32: what Hugging Face is to load."""

    def build_rounded(directory: Path | str, **over: Any) -> Path:
        original = build(directory, **over)
        return round_checkpoint(original, original.with_name(f"{original.name}-{kind}"), kind)

    return build_rounded


@dataclass(frozen=True)
class Quantizing(ElectiveSubject):
    """The elective. Given a checkpoint of rounded weights, its engine quantises the original."""

    kind: str = "block"

    def engine(self, path: Path, **options: Any) -> Any:
        return super().engine(ORIGINAL.get(path, path), **{"scales": self.kind} | options)


@pytest.fixture
def kind() -> str:
    return "block"


@pytest.fixture
def subject(request: pytest.FixtureRequest, kind: str) -> Any:
    found = make_subject("fp8", request.config.getoption("impl"))
    return Quantizing(found.elective, found.package, kind=kind)


# --- the parts --------------------------------------------------------------------------------------------------------


def test_every_byte_has_its_number(subject: Any) -> None:
    values = subject.module.e4m3_values()
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert values.shape == (256,) and values.dtype == torch.float32
    wrong = [
        f"{byte:3} = {byte:08b}: {ours} is {right}"
        for byte, (ours, right) in enumerate(zip(values.tolist(), expected.tolist(), strict=True))
        if ours != right and (ours == ours or right == right)
    ]
    assert not wrong, "\n".join(["byte: yours is right", *wrong[:5]])
    assert torch.equal(values.signbit()[:127], expected.signbit()[:127])
    assert subject.module.from_e4m3(torch.tensor([[-448.0, 0.015625]]).to(torch.float8_e4m3fn)).tolist() == [
        [-448.0, 0.015625]
    ]


def test_what_is_too_large_becomes_the_largest_and_the_rest_the_nearest(subject: Any) -> None:
    x = torch.tensor([1e6, -500.0, 17.0, 19.0, 21.1, 0.001, 0.0005, torch.nan])
    found = subject.module.from_e4m3(subject.module.to_e4m3(x)).tolist()
    assert found[:-1] == [448, -448, 16, 20, 22, 2.0**-9, 0]
    assert found[-1] != found[-1], "a NaN stays one"


@pytest.mark.parametrize("block", [(300, 200), (1, 200), (128, 128), (1, 128), (7, 9)])
def test_every_block_has_a_scale_of_its_own(subject: Any, block: tuple[int, int]) -> None:
    """Of 300 x 200 numbers of very different sizes, the last blocks being cut off. The largest of a block is 448."""
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(300, 200, generator=generator)
    matrix *= torch.logspace(-4, 4, 300)[:, None] * torch.logspace(-2, 2, 200)[torch.randperm(200, generator=generator)]
    matrix[5, 7] = -(matrix.abs().max() * 2)  # the largest magnitude is a negative number's
    found, scale = subject.module.quantize(matrix, block)
    assert found.dtype == torch.float8_e4m3fn and found.shape == matrix.shape
    assert scale.dtype == torch.float32 and scale.shape == (-(-300 // block[0]), -(-200 // block[1]))
    largest = found[5, 7].item()
    assert largest == -448, f"the largest magnitude becomes 448: {matrix[5, 7]:.4g} must be -448, and is {largest}"
    torch.testing.assert_close(scale[5 // block[0], 7 // block[1]], matrix[5, 7].abs() / 448)
    torch.testing.assert_close(subject.module.widen(found, scale, block), rounded(matrix, *block), atol=0, rtol=1e-6)


def test_zeros_and_bf16_are_quantised_as_well(subject: Any) -> None:
    for small in (0.0, 1e-44):
        matrix = torch.zeros(4, 6)
        matrix[2:] = 3
        matrix[0, 0] = small
        found = subject.module.widen(*subject.module.quantize(matrix, (2, 3)), (2, 3))
        torch.testing.assert_close(found, matrix, atol=1e-40, rtol=1e-6)
    half = torch.randn(8, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    found, scale = subject.module.quantize(half, (1, 8))
    assert scale.dtype == torch.float32, "eight bits of a scale would cost as much as those of the weights"
    expected = rounded(half.float(), 1, 8)
    torch.testing.assert_close(subject.module.widen(found, scale, (1, 8)), expected, atol=0, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activations", [False, True])
def test_the_linear_layer_multiplies_what_is_left(subject: Any, kind: str, activations: bool) -> None:
    """In any dtype. With rounded activations each token has a scale of its own, and where the weight has blocks, each
    of their columns as well."""
    generator = torch.Generator().manual_seed(3)
    linear = nn.Linear(200, 140)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        x = torch.randn(3, 200, generator=generator) * torch.tensor([[1.0], [1e4], [1e-3]])
        x[:, 150:] *= 1e-3
        layer = subject.module.FP8Linear(linear, kind, activations)
        weight = rounded(linear.weight.detach(), *block_of(kind, linear.weight))
        seen = rounded(x, 1, 128 if kind == "block" else 200) if activations else x
        expected = seen.double() @ weight.double().T + linear.bias.double()
        found = layer(x)
        wrong = f"{kind}, quantize_activations={activations}: x times the widened weight, plus the bias"
        for ours, right in zip(found, expected, strict=True):
            difference, size = (ours - right).abs().max().item(), right.abs().max().item()
            assert difference < 1e-5 * size, f"{wrong}: off by {difference:.2g} in outputs up to {size:.2g}"
        half = subject.module.FP8Linear(linear.bfloat16(), kind, activations)
        assert half(x.bfloat16()).dtype == torch.bfloat16
        assert half.weight.dtype == torch.float8_e4m3fn and half.weight_scale.dtype == torch.float32


def test_only_the_layers_linears_are_quantised(subject: Any, checkpoints: Path) -> None:
    engine = subject.engine(lively_qwen3(checkpoints))
    state = {**dict(engine.model.named_parameters()), **dict(engine.model.named_buffers())}
    in_bytes = {name for name, tensor in state.items() if tensor.element_size() == 1}
    assert in_bytes == {name for name in state if name.split(".")[-2] in LINEARS and name.endswith(".weight")}
    assert len(in_bytes) == 7 * 3
    assert not any(isinstance(module, nn.Linear) for module in engine.model.layers.modules())
    assert state["lm_head.weight"].dtype == torch.float32, "the head stays what it is"
    eight = subject.engine(lively_qwen3(checkpoints), quantize_activations=True).model
    for model, expected in ((engine.model, {False}), (eight, {True})):
        layers = [m for m in model.layers.modules() if isinstance(m, subject.module.FP8Linear)]
        assert {layer.quantize_activations for layer in layers} == expected and len(layers) == 7 * 3


def test_the_cache_keeps_rounded_keys_and_values(subject: Any, checkpoints: Path) -> None:
    """The logits are those of attention over rounded keys and values, and the cache takes a byte for each number."""
    path = rounding(lively_qwen3, "block")(checkpoints)
    [prompt] = random_prompts(19)
    told: list[Any] = []
    options = TIGHT | {"kv_cache_dtype": "fp8", "on_event": told.append}
    engine = subject.engine(path, **options)
    assert engine.cache.k.dtype == engine.cache.v.dtype == torch.float8_e4m3fn
    output, recorder = record_alone(engine, prompt, greedy(12, ignore_eos=True))
    known = prompt + output[:-1]
    found = recorder.logits_by_position(known)
    with rounded_attention() as used:
        expected = oracle.truth(path)._forward(tuple(known))
        assert used, "Hugging Face's attention was not reached"
    ours = torch.stack([found[p] for p in range(len(known))])
    exact = oracle.truth(path).logits(known)
    # A number that lies between two of e4m3 may be rounded either way, so some keys differ by a step
    assert oracle.rms(ours - expected) < 0.1 * oracle.rms(exact - expected)


def test_a_key_beyond_the_range_becomes_the_largest(subject: Any, checkpoints: Path) -> None:
    engine = subject.engine(lively_qwen3(checkpoints), kv_cache_dtype="fp8", num_blocks=2)
    heard: list[Tensor] = []

    def hear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heard.extend([k, v])
        return q

    tokens = torch.tensor([1, 2])
    batch = Batch(tokens, tokens, slots=torch.tensor([17, 3]), last_tokens=tokens, attention=hear)
    k = torch.full((2, 2, 32), 1e5)
    engine.cache.attend(batch, 1, torch.zeros(2, 4, 32), k, -k)
    for widened, largest in zip(heard, (448, -448), strict=True):
        assert widened.dtype == torch.float32 and widened.shape == (2, 16, 2, 32)
        assert (widened[1, 1] == largest).all() and (widened[0, 3] == largest).all()
        assert widened.abs().sum() == 448 * 2 * 64, "nothing is written elsewhere"


def test_an_option_that_is_none_is_refused(subject: Any, checkpoints: Path) -> None:
    path = lively_qwen3(checkpoints)
    with pytest.raises(ValueError, match="scales must be 'tensor', 'channel' or 'block', got 'row'"):
        subject.engine(path, scales="row")
    with pytest.raises(ValueError, match="kv_cache_dtype must be 'auto' or 'fp8', got 'int8'"):
        subject.engine(path, kv_cache_dtype="int8")


# --- the whole --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "build"),
    [
        ("channel", random_qwen2),
        pytest.param("tensor", lively_qwen3, marks=SLOW),
        pytest.param("block", random_llama, marks=SLOW),
    ],
)
def test_tokens_are_those_of_rounded_weights_in_a_pool_far_too_small(
    subject: Any, checkpoints: Path, kind: str, build: Build
) -> None:
    """In chunks, in company, and some of them preempted."""
    told: list[Any] = []
    options = TIGHT | {"num_blocks": 10, "max_num_seqs": 6, "on_event": told.append}
    outputs = run(subject, rounding(build, kind)(checkpoints), PROMPTS, greedy(12, ignore_eos=True), **options)
    assert any(event["type"] == "preempted" for event in told)
    assert len({token for output in outputs for token in output}) > 30


@SLOW
@pytest.mark.parametrize("kind", KINDS)
def test_rounded_activations_give_the_logits_of_a_model_that_rounds_them(
    subject: Any, checkpoints: Path, kind: str
) -> None:
    path = rounding(lively_qwen3, kind)(checkpoints)
    [prompt] = random_prompts(40)
    output, recorder = record_alone(subject.engine(path, **TIGHT, quantize_activations=True), prompt, greedy(4))
    known = prompt + output[:-1]
    found = recorder.logits_by_position(known)
    ours = torch.stack([found[p] for p in range(len(known))])
    judge = oracle.truth(path)
    with rounded_inputs(judge.model, 128 if kind == "block" else 4096):
        expected = judge._forward(tuple(known))
    # Here, too, a number between two of e4m3 may be rounded either way
    assert oracle.rms(ours - expected) < 0.1 * oracle.rms(judge.logits(known) - expected)


@SLOW
class TestConformance(Conformance):
    """The suite of the stages, whose models are judged with rounded weights. Blocks, and of other kinds the tokens."""

    test_chats_are_hf_s = None  # type: ignore[assignment]  # half a gigabyte of rounded weights

    @pytest.fixture
    def story_model(self, checkpoints: Path, kind: str) -> Path:
        return round_checkpoint(STORY_MODEL, checkpoints / f"story_model-{kind}", kind)

    @pytest.mark.parametrize("number", [5])
    def test_stories_are_hf_s(self, subject: Any, story_model: Path, number: int) -> None:
        super().test_stories_are_hf_s(subject, story_model, number)

    @pytest.fixture(autouse=True)
    def models(self, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        for build in (lively_qwen3, random_llama, random_qwen2):
            monkeypatch.setattr(conformance, build.__name__, rounding(build, kind))

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("build", [lively_qwen3, random_llama, random_qwen2])
    def test_greedy_tokens_are_hf_s(self, subject: Any, checkpoints: Path, build: Build, kind: str) -> None:
        super().test_greedy_tokens_are_hf_s(subject, checkpoints, rounding(build, kind))


@pytest.mark.gpu
def test_a_gpu_gives_the_same_tokens(subject: Any, checkpoints: Path) -> None:
    options: dict[str, Any] = TIGHT | {"device": "cuda", "dtype": torch.float32}
    run(subject, rounding(lively_qwen3, "block")(checkpoints), PROMPTS, greedy(12, ignore_eos=True), **options)
    options |= {"dtype": torch.bfloat16, "quantize_activations": True, "kv_cache_dtype": "fp8"}
    outputs = subject.engine(lively_qwen3(checkpoints), **options).generate(PROMPTS, greedy(12, ignore_eos=True))
    oracle.check_lively([token for output in outputs for token in output])


@contextmanager
def rounded_inputs(model: Any, columns: int) -> Iterator[None]:
    """Linear layers within the layers of Hugging Face's model see inputs rounded by token and `columns`."""

    def round_input(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        flat = inputs[0].flatten(0, -2)
        return (rounded(flat, 1, columns).view(inputs[0].shape),)

    linears = [module for module in model.model.layers.modules() if isinstance(module, nn.Linear)]
    hooks = [linear.register_forward_pre_hook(round_input) for linear in linears]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def rounded_attention() -> Iterator[list[int]]:
    """Attention over keys and values in e4m3. Gives a list to which every call adds how many keys it saw."""
    calls: list[int] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def attend_rounded(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
        calls.append(k.shape[-2])
        k, v = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (k, v))
        return attend(q, k, v, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend_rounded)
        yield calls


# --- what it costs ----------------------------------------------------------------------------------------------------


@SLOW
def test_stories_lose_less_than_a_hundredth(subject: Any) -> None:
    """Held-out stories: the loss with every kind of scale, with rounded activations and with a rounded cache."""
    from stages.stage_5_continuous_batching import ContinuousBatchingEngine
    from tools.pictures.eight_bits import judge
    from tools.pictures.three_requests import load_tokenizer
    from training.grammar import generate_story

    tokenizer = load_tokenizer()
    tales = [generate_story(random.Random(seed), held_out=True).text for seed in range(20)]
    texts = [tokenizer.encode(tale).ids[:200] for tale in tales]
    exact = ContinuousBatchingEngine(str(STORY_MODEL), num_blocks=16)
    options: dict[str, dict[str, Any]] = {kind: {"scales": kind} for kind in KINDS}
    options["all"] = {"quantize_activations": True, "kv_cache_dtype": "fp8"}
    engines = {name: subject.engine(STORY_MODEL, num_blocks=16, **chosen) for name, chosen in options.items()}
    found = judge(exact, {"exact": exact, **engines}, texts)
    for name in options:
        assert abs(found[name].loss / found["exact"].loss - 1) < 0.01
        assert 0.01 < found[name].error < 0.1 and 0.97 < found[name].same < 1
    assert found["block"].error < found["all"].error
