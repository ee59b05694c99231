# %% [markdown]
# # 6. CUDA graphs: the piano roll
#
# A pianist reads a note, presses a key, reads the next note. However fast the piano is, the piece cannot be faster than
# the reading. A *player piano* reads nothing: somebody has played the piece once while a machine punched holes into a
# paper roll, and ever since the roll plays it as fast as the hammers move.
#
# On a GPU, Python is the pianist, and every decode step is the same piece. This notebook punches the roll.
#
# You need no GPU: what only a GPU can show is a recording here, and says so.
#
# Beside this notebook open `stages/stage_6_cuda_graphs.py`; it holds the solutions of the exercises, so close it while
# you write your own. `make stage-6-diff` shows what changed, solutions as well.
#
# **About 35 minutes, and 55 minutes for the exercises.** You need notebook 5.

# %%
from functools import partial

import torch

from benchmarks.lib.harness import RESULTS
from stages.core import make_sequences
from stages.stage_4_prefix_caching import PrefixCachingPool
from stages.stage_5_continuous_batching import ContinuousBatchingEngine
from stages.stage_6_cuda_graphs import CUDAGraph, CUDAGraphEngine, Rows, bucket_ladder
from tools.pictures.decode_profile import TapeGraph, busy_us, launch_ms, load_recording, step_ms, trace
from tools.pictures.plots import buckets, timeline
from tools.pictures.steps import swimlane
from tools.pictures.three_requests import (
    BLOCK_SIZE,
    NAMES,
    NUM_BLOCKS,
    SEATS,
    STORY_MODEL,
    compare,
    hugging_face_greedy,
    list_exercises,
    record,
    show_table,
    source,
    three_requests,
)

prompts, params = three_requests()
OPTIONS = {"max_num_seqs": SEATS, "block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS}

# %% [markdown]
# ## The three requests

# %%
run = record(CUDAGraphEngine, **OPTIONS)
swimlane(run.events, names=NAMES, title="Stage 6: who runs when")

# %% [markdown]
# Have you seen it before? It is the picture of notebook 5:

# %%
# NBVAL_CHECK_OUTPUT
before = record(ContinuousBatchingEngine, **OPTIONS)
told = [[{k: v for k, v in e.items() if k != "t"} for e in r.events] for r in (before, run)]
print("every event is the same as in stage 5:", told[0] == told[1])
work = [(e["step"], e["tokens"]) for e in run.events if e["type"] == "scheduled"]
steps, with_prompt = {step for step, _ in work}, {step for step, tokens in work if tokens > 1}
print(f"{len(steps)} steps, a prompt in {len(with_prompt)} of them; in the others everybody decodes")

# %% [markdown]
# Nothing changes in *what* is computed, or when. Everything is in how a step is carried out, and only in those steps in
# which each sequence has one token: here all but the two with a prompt in them.
#
# ## What hurt
#
# One decode step of stage 5, one sequence, on the small model of these notebooks and on this CPU: a piece out of its
# middle. Each bar is one operation of torch, and between the bars Python looks for the next one:

# %%
engine = ContinuousBatchingEngine(STORY_MODEL)
events = min((trace(engine, batch=1) for _ in range(5)), key=lambda events: events[-1][2])  # the least disturbed
timeline(
    {f"stage 5: {len(events)} operations in the step": events},
    title="A piece of a decode step, on this CPU",
    first_us=events[400][2],
    last_us=events[470][2],
)

# %% [markdown]
# On a CPU the bars are the work. On a GPU an operation of torch does not compute: it *launches* a kernel, that is, it
# writes an order into a queue and returns. Launching takes as long as it takes, whether the kernel has a lot to do or
# not. How long, for a model worth a GPU? Here is Qwen3-0.6B with all its 28 layers, but with matrices of 16 columns, so
# that computing takes no time, and naming what is to be computed takes all of it:

# %%
overhead = launch_ms()
print(f"a decode step of Qwen3-0.6B takes this CPU at least {overhead:.1f} ms, if computing were free")

# %% [markdown]
# The memory of an H100 can deliver all 1.2 GB of that model's weights in 0.4 ms.
#
# ## Guess first
#
# Now the real thing: one decode step of one sequence, Qwen3-0.6B, stage 5, on a GPU. **Guess:** in how many percent of
# the time does the GPU compute anything?

# %%
my_guess = None  # percent

# %%
# NBVAL_CHECK_OUTPUT
recording = load_recording()
if recording:
    five = recording["stages"]["stage 5"]
    kernels = [event for event in five["events"] if event[0] == "gpu"]
    print(f"stage 5, batch {recording['batch']}: {len(kernels):,} kernels and copies, {five['step_ms']:.1f} ms")
    compare(my_guess, busy_us(five["events"], "gpu") / five["step_ms"] / 10, "percent")

# %%
if recording:
    picture = timeline({"stage 5": five["events"]}, title=f"One decode step (recorded on {recording['card']})")
picture if recording else None

# %% [markdown]
# The paler, the more idle: the CPU is busy from the first moment to the last, and the GPU waits for it.
#
# (On the newest GPUs PyTorch would leave attention to cuDNN, which plans anew for every length that it has not seen,
# and when decoding every step has a new one. The stages switch that off, in `stages/model.py`, so none of it is in the
# picture.)
#
# A closer look at a few microseconds out of the middle:

# %%
if recording:
    middle = five["events"][len(five["events"]) // 2][2]
    picture = timeline(
        {"stage 5": five["events"]},
        title=f"A piece of it (recorded on {recording['card']})",
        first_us=middle,
        last_us=middle + 300,
    )
picture if recording else None

# %% [markdown]
# The GPU plays a note and waits for the pianist. A faster GPU would not help at all.
#
# ## The idea: punch the roll
#
# CUDA can *capture* a stream: between begin and end of a capture, launches are not carried out but written down, with
# all their arguments, as a **graph**. `replay()` then hands the whole list to the GPU at once. Here is all of it:

# %%
# NBVAL_CHECK_OUTPUT
source(CUDAGraph)

# %% [markdown]
# ### What a graph cannot do
#
# The roll plays what was punched, nothing else. That has three consequences, which decide what the stage looks like.
# To see them without a GPU we take a *tape* (in `tools/pictures/decode_profile.py`), which records operations of torch
# as a graph records kernels, and has the same manners.
#
# **1. Addresses are frozen.** The arguments of a kernel are pointers. New data must come to the *old place*; a new
# tensor under the same name is not noticed:

# %%
# NBVAL_CHECK_OUTPUT
x = torch.tensor([1.0, 2.0, 3.0])
graph = TapeGraph(lambda: 10 * x)
print("recorded:            ", graph.output.tolist())
x.copy_(torch.tensor([4.0, 5.0, 6.0]))
print("copied in, replayed: ", graph.replay().tolist())
x = torch.tensor([7.0, 8.0, 9.0])
print("renamed, replayed:   ", graph.replay().tolist())

# %% [markdown]
# **2. Numbers, shapes and decisions of Python are frozen.** An `if` was decided when the roll was punched, and a list
# was as long as it was:

# %%
# NBVAL_CHECK_OUTPUT
rows = torch.arange(12.0).view(4, 3)
wanted = [0, 1]
graph = TapeGraph(lambda: rows[wanted] if len(wanted) < 3 else rows * 0)
wanted[:] = [3, 2, 0, 1]
print("after the list has grown to four:", graph.replay().tolist())

# %% [markdown]
# **3. Nobody may ask.** "How long is the longest context?" is a question to the GPU, and the answer is not there when
# nothing has run yet. On a GPU the capture fails with *operation not permitted when stream is capturing*; the tape says
# it in its own words:

# %%
# NBVAL_CHECK_OUTPUT
lengths = torch.tensor([5, 9, 2])
try:
    TapeGraph(lambda: torch.zeros(int(lengths.max())))
except RuntimeError as refused:
    print("refused:", refused)

# %% [markdown]
# Stage 5 does all three in every step: `make_batch` builds new tensors, shapes follow from the number of sequences and
# from the longest context, and logits go to the CPU, where `sample` looks at them. So:
#
# | frozen | what stage 6 does |
# |---|---|
# | addresses | inputs live in one piece of memory that is allocated once; a step copies into it |
# | the number of sequences | a recording for each of a few sizes, and padding up to the next one |
# | the width of block tables | as wide as they can ever become; a length on the device says what counts |
# | questions | attention reads lengths on the device; sampling is an `argmax` on the device |
#
# ### Buckets
#
# A recording for every batch size up to 256 would take time and memory for each of them; only powers of two would let a
# batch of 33 compute 31 rows of nothing. The usual ladder is in between:

# %%
# NBVAL_CHECK_OUTPUT
print(bucket_ladder(40), bucket_ladder(100), sep="\n")

# %%
buckets(bucket_ladder(40))

# %% [markdown]
# Is padding a waste? On a GPU hardly: a decode step is mostly reading weights, and these are read once, whether for 33
# rows or for 40.
#
# ### Padding, and where it may write
#
# A row of padding is computed like any other: it has a token, writes a key and a value, and attends to something. It
# must not harm anybody. So the cache has one block more than the pool knows of, the **scratch block**, and padding is a
# sequence of one token that lives there. Three sequences in a bucket of four, as they lie in the input memory:

# %%
# NBVAL_CHECK_OUTPUT
three = make_sequences(prompts, params, vocab_size=4096, max_model_len=2048)
pool = PrefixCachingPool(NUM_BLOCKS, BLOCK_SIZE)
assert all(pool.allocate(seq, len(seq.token_ids)) for seq in three)
memory = Rows.of(torch.zeros(4 * (5 + 6), dtype=torch.int64), bucket=4)  # five numbers and a table of six blocks a row
memory.fill(three, BLOCK_SIZE, scratch_block=NUM_BLOCKS)
for name in ("input_ids", "positions", "slots", "context_lens", "block_tables"):
    print(f"{name:13}", *(f"{numbers!s:>25}" for numbers in getattr(memory, name).tolist()))
print(f"the scratch block is number {NUM_BLOCKS}, its first slot number {NUM_BLOCKS * BLOCK_SIZE}")

# %% [markdown]
# The table of a sequence is filled up with the scratch block, too: what lies behind the context length is masked, but
# it must be a block that exists.
#
# ## The code
#
# What is recorded. It reads `device_memory` and `noise`, and nothing else that changes:

# %%
# NBVAL_CHECK_OUTPUT
source(CUDAGraphEngine.decode_step)

# %% [markdown]
# And a step, in three lines: copy in, replay, copy out. The noise of rows that sample is drawn on the CPU and copied,
# since it must be what all stages draw for that seed. (The engine in `nanovllm` computes it on the GPU from a counter.)

# %%
# NBVAL_CHECK_OUTPUT
source(CUDAGraphEngine.replay, CUDAGraphEngine.bucket_for)

# %% [markdown]
# On a machine without a GPU the engine calls `decode_step` where it would replay it: the same buckets, the same
# padding, the same memory, nothing gained.
#
# ## Is it right?
#
# With the stand-in, and with every bucket recorded on tape *before* any request came. If a number of Python's were
# frozen in it, or an address changed, the second could not be right:

# %%
# NBVAL_CHECK_OUTPUT
expected = hugging_face_greedy(prompts, params)
print("stand-in: identical to transformers:", [a == b for a, b in zip(run.outputs, expected, strict=True)])
taped = CUDAGraphEngine(STORY_MODEL, **OPTIONS)
taped.graphs = {bucket: TapeGraph(partial(taped.decode_step, bucket)) for bucket in taped.buckets}
outputs = taped.generate(prompts, params)
taped.graphs = taped.record()  # the stand-in again
print("on tape:  identical to transformers:", [a == b for a, b in zip(outputs, expected, strict=True)])

# %% [markdown]
# ## Is it fast?
#
# Not here, on the contrary. There is nothing to be saved by the stand-in, and it pays for a shape that never changes:
# every layer gathers as many slots as a table could ever have, and masks all that are not in use. Stage 5 gathers the
# context that there is. (On a GPU a kernel reads the blocks in use and no others.)

# %%
print(f"on this CPU, batch 1: stage 5 {step_ms(engine, 1):.1f} ms, stage 6 {step_ms(taped, 1):.1f} ms a step")
print(f"stage 6 gathers {taped.table_width * BLOCK_SIZE:,} slots a sequence, in each of its layers")

# %% [markdown]
# On a GPU: **guess**, how many times as fast is a decode step of one sequence?

# %%
my_guess = None  # times as fast

# %%
if recording:
    compare(my_guess, five["step_ms"] / recording["stages"]["stage 6"]["step_ms"], "times as fast")

# %%
if recording:
    labels = {name: f"{name}: {stage['step_ms']:.1f} ms" for name, stage in recording["stages"].items()}
    picture = timeline(
        {labels[name]: stage["events"] for name, stage in recording["stages"].items()},
        title=f"One decode step (recorded on {recording['card']})",
    )
picture if recording else None

# %% [markdown]
# (The figure over each panel is the time of a step without the profiler. The profiler makes steps longer, those in the
# picture, too: look at the pattern, and not at the axis. It is also why the GPU seems to start so late in a replay.)
#
# In a replay the kernels run back to back. They are those of stage 5 but for attention: here one kernel in each layer
# reads the blocks where they lie, while stage 5 copies keys and values together first, and torch attends to them in
# many small steps. The CPU hands over the roll; its last long bar is `tolist`, which waits for the tokens. It could
# schedule the next step meanwhile, which is what `nanovllm` does.
#
# Hundreds of small kernels remain, each of which writes to memory what the next one reads again. torch.compile fuses
# those between the matrix products: "stage 6 compiled" is this stage with compiled layers, made for the benchmark alone
# (`benchmarks/stages/runners.py`). Compiling takes much longer than recording, every time an engine is built.
#
# The showcase of this stage, as it was measured:

# %%
# NBVAL_CHECK_OUTPUT
show_table("stage_6.h200", RESULTS)

# %% [markdown]
# *Other tokens?* The GPU computes in bf16, where two correct programs add up in different orders; if two tokens are
# nearly as good, either may win. In float32, as above, the tokens are the same. (The README says under "How correct it
# is" how bf16 is judged.) In the last column stage 5 has the attention of stage 6, and is no faster for it: with either
# attention the CPU launches kernel by kernel, and that is what takes the time. What lies between the last column and
# stage 6 is launches, and what the CPU does between launches.
#
# *Why so wide ranges?* While this was measured, other programs ran on the same machine's CPUs. Whoever launches feels
# it, and a replay hardly does. With the CPU to itself stage 5 would likely do better, and the gain be smaller.
#
# ### What it costs

# %%
if recording:
    for name, stage in recording["stages"].items():
        kernels = sum(track == "gpu" for track, *_ in stage["events"])
        orders = len(stage["events"]) - kernels  # operations of torch and calls of the driver
        graph = f"; its graph takes {stage['graph_bytes'] / 2**20:.0f} MiB" if stage["graph_bytes"] else ""
        print(f"{name:17}{orders:6,} orders of the CPU for {kernels:5,} kernels and copies in a step{graph}")

# %% [markdown]
# Memory for the intermediate results, which can be shared by all graphs as no two run at the same time; and time when
# the engine starts. A graph is only as good as its guess what will be asked for: prefill, with a different number of
# tokens each time, is not recorded. It has enough work in each kernel to hide the launches.
#
# ## What still hurts
#
# One GPU holds the whole model, and reads all its weights for every token. Stage 7 splits it.
#
# ## Your turn
#
# ```
# make stage-6-exercise                 # writes exercises/stage_6_cuda_graphs.py
# make stage-6-test IMPL=exercises      # tells you how you did
# ```

# %%
# NBVAL_CHECK_OUTPUT
list_exercises(6)

# %% [markdown]
# <details><summary>If you are stuck</summary>
#
# - **the ladder**: what is it for `max_num_seqs` of 1, 3, 8 and 9? The last bucket must hold a full engine.
# - **the input memory**: write every row every time. What the last step left there belongs to somebody who may be gone.
# - **sampling**: one expression for greedy and sampled rows alike. A temperature of 0 makes the noise vanish.
# - **whole tables**: a slot is `block * block_size + offset`, for all blocks of all rows at once. Nothing may depend on
#   how long the contexts are, but the mask.
#
# </details>
#
# `make stage-6-mutants` shows what the mistakes look like: one of them writes its padding to slot 0.
#
# **To think about.** (a) Could prefill be recorded? What would be its buckets, and what would padding cost? (b) The
# graphs of all buckets share one piece of memory. Why is it enough for all, and why are they captured from the largest
# to the smallest? (c) A replay is asynchronous. What could the CPU do while it runs, and what would it have to know for
# that?
#
# ## Further reading
#
# - Ng, Gray et al., [Accelerating PyTorch with CUDA
#   Graphs](https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/), 2021: how torch captures, and what it
#   keeps alive.
# - NVIDIA, [Getting Started with CUDA Graphs](https://developer.nvidia.com/blog/cuda-graphs/), 2019: why a launch costs
#   what it costs.
# - Ansel et al., [PyTorch 2](https://pytorch.org/assets/pytorch2-2.pdf), 2024: how torch.compile finds what it can
#   fuse, and why a graph break at attention is no harm here.
# - In vLLM: `vllm/v1/worker/gpu_model_runner.py` (`capture_model`), and `vllm/compilation/cuda_graph.py`. There prefill
#   is recorded as well, in pieces around attention.
