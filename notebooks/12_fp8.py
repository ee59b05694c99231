# %% [markdown]
# # 12. FP8: what eight bits lose and gain
#
# On a GPU, a decode step takes at least as long as reading the weights and the KV cache takes. In bf16 every number in
# them has two bytes. If each had one byte, half as much would be read, and the model would need half the memory.
#
# But one byte has 256 values, where bf16 has 65,536. Are they enough? You will see which 256 they are, what a **scale**
# is for, who should share one, what a model loses, and what it gains. Real checkpoints of this kind have names such as
# `Qwen3-8B-FP8`.
#
# This chapter is an *elective*: it stands on stage 5, and no other chapter stands on it. Its model is the one that you
# know, with weights that are rounded while they are loaded. Rounding them like this is called **quantising** them.
#
# Beside this notebook open `stages/electives/fp8.py`; it holds the solutions of the exercises, so close it while you
# write your own.
#
# **About 30 minutes, and 30 minutes for the exercises.** You need notebook 5.

# %%
import json
import random
import tempfile
import time
from pathlib import Path

import torch

from stages.checkpoint import read_config
from stages.core import SamplingParams
from stages.electives.fp8 import FP8Engine, FP8KVCache, FP8Linear, block_of, e4m3_values, quantize
from stages.stage_5_continuous_batching import ContinuousBatchingEngine
from tools.pictures.eight_bits import (
    KINDS,
    activation_errors,
    judge,
    numbers_picture,
    octaves_picture,
    plant_outlier,
    save_widened,
    scales_picture,
    step_bytes,
    stored_bytes,
    use_int8,
    weight_errors,
)
from tools.pictures.plots import bars, lines
from tools.pictures.steps import swimlane
from tools.pictures.three_requests import (
    BLOCK_SIZE,
    NAMES,
    NUM_BLOCKS,
    ROOT,
    SEATS,
    STORY_MODEL,
    compare,
    hugging_face_greedy,
    list_exercises,
    load_tokenizer,
    record,
    source,
    three_requests,
)
from training.grammar import generate_story

tokenizer = load_tokenizer()
prompts, params = three_requests()

# %% [markdown]
# ## The three requests

# %%
SMALL = {"max_num_seqs": SEATS, "block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS}
run = record(FP8Engine, **SMALL)
swimlane(run.events, names=NAMES, title="FP8: who runs when")

# %% [markdown]
# This is the picture of stage 5. Every linear layer has been replaced by one in FP8. Scheduler, blocks and attention do
# not notice.
#
# ## What hurt
#
# So much of the weights must be read in a decode step, in bf16 and with linear layers in FP8:

# %%
# NBVAL_CHECK_OUTPUT
half = ContinuousBatchingEngine(STORY_MODEL, dtype=torch.bfloat16, num_blocks=1).model
eight = FP8Engine(STORY_MODEL, dtype=torch.bfloat16, num_blocks=1).model
in_layers = stored_bytes(half) - 2 * half.embed_tokens.weight.numel()
print(f"bf16: {stored_bytes(half):10,} bytes, of which {in_layers / stored_bytes(half):.0%} in the layers")
print(f"FP8:  {stored_bytes(eight):10,} bytes, {stored_bytes(eight) / stored_bytes(half):.0%} of it")

# %% [markdown]
# The head stays in bf16, here and in published checkpoints: it chooses the token, and no later layer can smooth its
# errors. A small model with a vocabulary as large as this one has a large head. Of 8 billion weights a head is a small
# part.
#
# ## Guess first
#
# Each weight in the layers is replaced by one of 253 numbers, times a scale. By how many percent does the loss change,
# on stories that the model has not seen?

# %%
my_guess = None  # percent

# %%
tales = [generate_story(random.Random(seed), held_out=True).text for seed in range(12)]
texts = [tokenizer.encode(tale).ids[:300] for tale in tales]
POOL = {"num_blocks": 24}
exact = ContinuousBatchingEngine(STORY_MODEL, **POOL)
found = judge(exact, {"exact": exact, "FP8": FP8Engine(STORY_MODEL, **POOL)}, texts)
compare(my_guess, 100 * abs(found["FP8"].loss / found["exact"].loss - 1), "percent, up or down")

# %% [markdown]
# That is next to nothing. How can that be?
#
# ## A byte by hand
#
# A byte of the format **e4m3** has a sign, 4 bits of exponent and 3 bits of mantissa. It stands for
# (1 + mantissa / 8) x 2^(exponent - 7), with the sign, unless the exponent is 0. Check a few of these bytes by hand:

# %%
# NBVAL_CHECK_OUTPUT
values = e4m3_values()
print("byte  sign exponent mantissa      value")
for byte in (0, 1, 7, 8, 9, 55, 56, 57, 126, 127, 184):
    bits = f"{byte:08b}"
    print(f"{byte:4}     {bits[0]}     {bits[1:5]}      {bits[5:]}  {values[byte].item():>9.6g}")
print(len(set(values[~values.isnan()].tolist())), "different numbers, up to", values.nan_to_num(0).max().item())

# %% [markdown]
# If the exponent is larger by one, the number is twice as large. Exponent 0 is a special case, as in every
# floating-point format: the one before the mantissa is left out, so that there is a zero. 256 bytes make 253 numbers,
# because two bytes are zero and two are NaN.
#
# Here are all the numbers on a line, and below them the weights of a layer, divided by a scale. The scale was chosen so
# that the largest weight becomes 448:

# %%
weight = exact.model.layers[3].mlp.up_proj.weight
scale = quantize(weight, block_of("tensor", weight))[1]
numbers_picture(weight / scale, "All numbers of e4m3, and weights that will be rounded to them")

# %% [markdown]
# Most numbers lie near zero, and so do most weights. Now the same by octaves. An **octave** goes from a power of two to
# the next: how many numbers does each have?

# %%
octaves_picture(
    {"weights": weight, "weights, divided by their scale": weight / scale}, "How e4m3 is spread, and how weights are"
)

# %% [markdown]
# There are eight numbers per octave, in 15 octaves. Below these, they thin out. So the *relative* error of a weight is
# at most a sixteenth, whether the weight is large or small. That is what floating point means. And that is why a scale
# does not make weights more exact: it moves them into the range.
#
# ## Guess again
#
# Round all weights in the layers. What is the RMS error, as a share of the weights' own RMS? Guess it for e4m3 with a
# scale for each tensor. Guess also whether it is smaller for `int8`: 255 whole numbers, equally far from each other,
# with the same kinds of scales.

# %%
my_guess = None  # percent

# %%
errors = weight_errors(exact.model)
compare(my_guess, 100 * errors["tensor"][0], "percent")

# %%
# NBVAL_CHECK_OUTPUT
print(f"{'scale per':10} {'e4m3':>7} {'int8':>7}")
for kind, (e4m3, int8) in errors.items():
    print(f"{kind:10} {e4m3:7.2%} {'' if int8 != int8 else f'{int8:7.2%}'}")

# %% [markdown]
# Two surprises. First, `int8` is *better*: most of these weights lie in a few octaves, so the other octaves of e4m3 are
# of no use. Second, for e4m3 it hardly matters who shares a scale. Even without a scale it is nearly as good, because
# these weights happen to lie within its range. For `int8` it matters: the largest weight decides how wide all steps
# are, so a scale that few weights share is better.
#
# Why FP8, then? Because of the *inputs* of the layers. Round them, with a scale for each token. The column "largest"
# says how many times larger than the RMS of a token its largest number is:

# %%
# NBVAL_CHECK_OUTPUT
print(f"{'input of':10} {'largest':>8} {'e4m3':>7} {'int8':>7}")
for kind, (largest, e4m3, int8) in activation_errors(exact, texts[:4]).items():
    print(f"{kind:10} {largest:8.1f} {e4m3:7.2%} {int8:7.2%}")

# %% [markdown]
# The input of `down_proj` is a product of two vectors, and has outliers. Here e4m3 is better: the steps of `int8` are
# too wide for all the small numbers. In large models the inputs of other layers have outliers too (Dettmers et al.,
# below). So whoever rounds activations as well as weights needs many octaves. And NVIDIA's tensor cores have multiplied
# e4m3 by e4m3 since 2022.
#
# ## Who shares a scale
#
# Three layouts are in use:
#
# - one scale for the whole **tensor**;
# - one for each output **channel**, which is a row of the weight. Checkpoints of the library compressed-tensors call
#   these scales `weight_scale`;
# - one for each **block** of 128 x 128 weights. DeepSeek's and Qwen's own checkpoints have these. They call them
#   `weight_scale_inv`, and yet the weights are multiplied by them.

# %%
scales_picture(weight, KINDS, "The scales of one weight")

# %%
# NBVAL_CHECK_OUTPUT
for kind in KINDS:
    bytes_per_weight = 1 + 4 * quantize(weight, block_of(kind, weight))[1].numel() / weight.numel()
    print(f"{kind:8} {bytes_per_weight:.4f} bytes per weight, its share of the scales included")

# %% [markdown]
# ## The code
#
# The table of all numbers:

# %%
# NBVAL_CHECK_OUTPUT
source(e4m3_values)

# %% [markdown]
# The scales. All three layouts are blocks: one block that is the whole tensor, blocks of one row each, or blocks of
# 128 x 128.

# %%
# NBVAL_CHECK_OUTPUT
source(quantize)

# %% [markdown]
# And the layer. It can round its inputs as well, which is called W8A8 (weights of 8 bits, activations of 8 bits). Then
# each token gets scales of its own, at each step. So what the other tokens look like does not matter to a token.

# %%
# NBVAL_CHECK_OUTPUT
source(FP8Linear.forward)

# %% [markdown]
# ## Is it right?
#
# The outputs need not be those of the exact model. They must be those of a model that *has* the rounded weights. So
# save the rounded weights in float32, and let transformers load them:

# %%
# NBVAL_CHECK_OUTPUT
with tempfile.TemporaryDirectory() as folder:
    rounded = save_widened(FP8Engine(STORY_MODEL, num_blocks=1), STORY_MODEL, Path(folder))
    expected = hugging_face_greedy(prompts, params, rounded)
for name, ours, theirs in zip(NAMES, run.outputs, expected, strict=True):
    print(f"{name}: {len(ours)} tokens, identical to transformers: {ours == theirs}")

# %% [markdown]
# ## What is lost
#
# Each model reads twelve beginnings of stories. "Error" is the RMS error of the logits, as a share of their standard
# deviation. "Same token" is how often the most likely token is that of the exact model. The last two rows add to blocks
# first rounded inputs, then a rounded KV cache.

# %%
options = {f"weights, by {kind}": {"scales": kind} for kind in KINDS}
options["and activations"] = {"quantize_activations": True}
options["and the KV cache"] = {"quantize_activations": True, "kv_cache_dtype": "fp8"}
engines = {"exact": exact} | {name: FP8Engine(STORY_MODEL, **POOL, **chosen) for name, chosen in options.items()}
losses = judge(exact, engines, texts)
print(f"{'e4m3 has':20} {'loss':>7} {'change':>8} {'error':>7} {'same token':>11}")
for name, j in losses.items():
    print(f"{name:20} {j.loss:7.4f} {j.loss / losses['exact'].loss - 1:+8.2%} {j.error:7.1%} {j.same:11.1%}")

# %% [markdown]
# The logits are off by a few percent, and the loss hardly moves: the errors of 6 million weights point in all
# directions, and mostly cancel.
#
# The cache has no scale at all. (vLLM's has none either, unless it is given one.) Keys and values are rounded as they
# come, which is good as long as they lie within the range:

# %%
full = ContinuousBatchingEngine(STORY_MODEL, **POOL)
full.generate(texts[:1], SamplingParams(temperature=0, max_tokens=1))
written = len(texts[0]) // BLOCK_SIZE  # blocks of the cache
kept = {"keys": full.cache.k[:, :written], "values": full.cache.v[:, :written]}
octaves_picture(kept, "Where keys and values lie")

# %%
# NBVAL_CHECK_OUTPUT
source(FP8KVCache.attend)

# %% [markdown]
# ## Does it tell the same stories?
#
# At 99 of 100 positions both models would choose the same token. Let both continue twelve stories by 100 tokens each.
# How many of the twelve texts are the same to their last token?

# %%
my_guess = None  # texts

# %%
starts, greedy = [text[:30] for text in texts], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
told = [
    engine(STORY_MODEL, num_blocks=128).generate(starts, greedy) for engine in (ContinuousBatchingEngine, FP8Engine)
]
pairs = list(zip(*told, strict=True))
compare(my_guess, sum(ours == theirs for ours, theirs in pairs), "of 12 texts")

# %%
# NBVAL_CHECK_OUTPUT
first, (ours, theirs) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
at = next(i for i in range(100) if ours[i] != theirs[i])
print("both: ", tokenizer.decode(starts[first] + ours[:at])[-160:])
print("exact:", tokenizer.decode(ours[at : at + 25]))
print("FP8:  ", tokenizer.decode(theirs[at : at + 25]))

# %% [markdown]
# One different token is enough for another story, and each of a hundred tokens can be the one. Neither story need be
# worse. So do not judge a quantised model by whether its greedy texts are the same. Judge it by its loss, and by its
# errors beside the exact model on the *same* text.
#
# ## An outlier
#
# Large models have outliers: a few channels that are many times larger than the others. Plant one, without changing
# what the model computes. In each layer, make one row of `up_proj` larger by a factor, and the column of `down_proj`
# that it meets smaller by the same factor. If the whole tensor shares a scale, all other weights become small. `int8`
# has nothing left for them when the factor is about 2⁷. At which factor does that happen to e4m3?

# %%
my_guess = None  # the power of two at which a scale per tensor fails

# %%
powers, short = [0, 4, 8, 12, 16, 20], [text[:150] for text in texts[:2]]
curves = {"e4m3, by tensor": [], "e4m3, by channel": [], "int8, by tensor": []}
for power in powers:
    with tempfile.TemporaryDirectory() as folder:
        planted = plant_outlier(STORY_MODEL, Path(folder), 2.0**power, "row")
        some = {f"e4m3, by {kind}": FP8Engine(planted, scales=kind, **POOL) for kind in ("tensor", "channel")}
        some["int8, by tensor"] = use_int8(ContinuousBatchingEngine(planted, **POOL), "tensor")
        for name, j in judge(exact, some, short).items():
            curves[name].append(j.loss)
failed = next(
    power
    for power, loss in zip(powers, curves["e4m3, by tensor"], strict=True)
    if loss > 2 * curves["e4m3, by tensor"][0]
)
compare(my_guess, failed, "is the first of these powers at which it does")

# %%
axes = {"xlabel": "the outlier is larger by 2 to this power", "ylabel": "loss [nats per token]"}
drawn = {name: (powers, ys) for name, ys in curves.items()}
picture = lines(drawn, **axes, title="An outlier in an output channel", markers=True)
picture.axes[0].set_xticks(powers)
picture

# %% [markdown]
# e4m3 has 15 octaves, and three rough ones below. So it bears what `int8` does not. But at 2²⁰ a scale per tensor
# rounds all other weights to zero. With a scale per channel nothing is lost, since the outlier has a scale to itself.
#
# And if the outlier is a channel of the *input*? Then a part of it is in every row. This is a column of the projections
# before attention that is larger by a factor, and the norm before them undoes it:

# %%
for where, power in (("row", 16), ("row", 20), ("column", 16), ("column", 20)):
    with tempfile.TemporaryDirectory() as folder:
        planted = plant_outlier(STORY_MODEL, Path(folder), 2.0**power, where)
        some = {kind: FP8Engine(planted, scales=kind, **POOL) for kind in KINDS}
        found = {kind: f"by {kind} {j.loss:5.2f}" for kind, j in judge(exact, some, short).items()}
    print(f"an outlier of 2^{power} in a {where + ':':7}  loss", ", ".join(found.values()))

# %% [markdown]
# Against a row, channels are best. Against a column, blocks lose least: the weight has two of them side by side, and
# only one has the outlier. So no kind is always best. But it takes an outlier of more than 2¹⁶ to tell the three apart.
# Short of that all are good with e4m3, and speed may choose: a scale per channel can wait until after the product
# (why?), and a scale per block cannot.
#
# ## What is gained
#
# Bytes. How long does a decode step take at least, if it must read them? Take the sizes of Qwen3-8B, and the rate at
# which a plain read kernel was measured to read on an H200:

# %%
big = read_config(ROOT / "benchmarks" / "shapes" / "Qwen3-8B")
measured = json.loads((ROOT / "benchmarks" / "results" / "kernels.h200.json").read_text())
rate = measured["limits"]["read"]["bytes_per_second"]
loads = [(1, 1000), (16, 4000), (64, 4000)]  # sequences, and tokens that each has in the cache
kinds = {"bf16": {}, "FP8 weights": {"weight": 1.0}, "FP8 weights and KV cache": {"weight": 1.0, "kv": 1.0}}
microseconds = {name: [1e6 * step_bytes(big, *load, **kind) / rate for load in loads] for name, kind in kinds.items()}
names = [f"{sequences} x {context:,} tokens" for sequences, context in loads]
bars(
    microseconds,
    names,
    xlabel="sequences, and tokens in the cache of each",
    ylabel="time to read [µs]",
    title="Qwen3-8B: what a decode step must read",
)

# %%
# NBVAL_CHECK_OUTPUT
for (sequences, context), name in zip(loads, names, strict=True):
    numbers = [step_bytes(big, sequences, context, **kind) for kind in kinds.values()]
    print(f"{name:17}", ", ".join(f"{n / 1e9 / sequences:6.3f} GB" for n in numbers), "read per token")

# %% [markdown]
# For one user nearly all bytes are weights, so FP8 weights save nearly half of the reading. For 64 users most bytes are
# cache, and FP8 weights save little: then the cache must shrink. A cache in FP8 also has room for twice as many tokens
# in the same memory, so more sequences can share a step.
#
# That is what *must* be read. Does this engine, on this machine, gain the time?

# %%
for engine in (ContinuousBatchingEngine, FP8Engine):
    alone = engine(STORY_MODEL, num_blocks=16)
    alone.generate(starts[:1], SamplingParams(temperature=0, max_tokens=2))
    begin = time.perf_counter()
    alone.generate(starts[:1], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    print(f"{engine.__name__:24} {(time.perf_counter() - begin) / 50 * 1e3:5.1f} ms per token")

# %% [markdown]
# No: it is slower. Each weight is widened, written to memory, and read again, so more is moved than before. The byte
# must become a number *on its way* into the product.
#
# ## What still hurts
#
# That is what a kernel is for. It loads bytes, widens them in registers, and multiplies. Or it rounds the activations
# too, and lets tensor cores multiply bytes by bytes, which they do at twice the rate of bf16. The engine has
# [both kinds](../docs/kernels.md), in `nanovllm/kernels/fp8`. How much time a step gains with them depends on how many
# sequences share it: see [what was measured](../docs/results.md), and [how to use it](../docs/howto.md).
#
# And eight bits are not the least. With four bits a weight has 16 numbers. Such formats have a scale for each 16 or 32
# weights, and the scales are bytes themselves.
#
# ## Your turn
#
# ```
# make elective-fp8-exercise                 # writes exercises/electives/fp8.py
# make elective-fp8-test IMPL=exercises ARGS=-x      # tells you how you did, up to the first failure
# ```

# %%
# NBVAL_CHECK_OUTPUT
list_exercises("fp8")

# %% [markdown]
# <details><summary>If you are stuck</summary>
#
# - **the numbers**: `torch.arange(256)` are all bytes at once. `>>` moves bits to the right, and `&` keeps some of
#   them: `(byte >> 3) & 15` is the exponent. `torch.where` chooses between the two formulas.
# - **the scales**: `blocks` has four axes, and a scale belongs to the first and the third. `amax` takes two axes at
#   once. `scale[:, None, :, None]` stands where its block does.
# - **the layer**: `quantize` and `widen` serve activations as well: x is a matrix, and a block of it is one row high.
#
# </details>
#
# `make elective-fp8-mutants` shows what goes wrong when one of these is *almost* right.
#
# **To think about.** (a) With a scale per channel, `F.linear(x, bytes) * scale` gives what your layer gives. Why does
# it not with a scale per block? What would it save? (b) Why are the scales of activations found at each step, and those
# of a weight once? (c) A head has keys up to 600. What does this cache make of them, and what would you add to it? (d)
# Load the rounded model of "Is it right?", and round it again. What changes?
#
# ## Further reading
#
# - Micikevicius et al., [FP8 Formats for Deep Learning](https://arxiv.org/abs/2209.05433), 2022. The format, and why it
#   has no infinity.
# - Dettmers et al., [LLM.int8()](https://arxiv.org/abs/2208.07339), 2022. Which outliers large models have, and that
#   they are in few channels of the activations.
# - Xiao et al., [SmoothQuant](https://arxiv.org/abs/2211.10438), 2022. It moves outliers from activations into weights,
#   by the same trick that plants them in this chapter.
# - DeepSeek-AI, [DeepSeek-V3 Technical Report](https://arxiv.org/abs/2412.19437), 2024. Section 3.3: blocks of
#   128 x 128, and activations by token and 128 columns.
# - In vLLM: `vllm/model_executor/layers/quantization/fp8.py`, and `compressed_tensors/` beside it.
