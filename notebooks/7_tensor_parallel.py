# %% [markdown]
# # 7. Tensor parallelism: many hands
#
# Notebook 6 had a pianist. This one has the people who carry the piano. Four of them bear a quarter of the weight each;
# nobody could lift it alone; and all have to take each step together, so that they walk as fast as the slowest.
#
# The piano is a model that does not fit on one GPU, or is read too slowly by one. **Tensor parallelism** cuts every
# matrix of every layer into parts. Each part goes to a **rank**, a process with a device of its own.
#
# You need no GPU: two processes on this CPU are two ranks.
#
# Beside this notebook open `stages/stage_7_tensor_parallel.py`; it holds the solutions of the exercises, so close it
# while you write your own. `make stage-7-diff` shows what changed, solutions as well. The processes are in
# `stages/ranks.py`.
#
# **About 35 minutes, and 60 minutes for the exercises.** You need notebook 5.
#
# This runs in Jupyter only. A rank is a new Python, which imports the script that started it; and this file has no
# `if __name__ == "__main__":`, so as a plain script every rank would run it again.

# %%
import os
import pickle
import signal
from unittest.mock import patch

import torch
import torch.nn.functional as F

from benchmarks.lib.harness import RESULTS
from stages.core import SamplingParams, Sequence
from stages.ranks import Group, Team
from stages.stage_5_continuous_batching import ContinuousBatchingEngine
from stages.stage_7_tensor_parallel import (
    Piece,
    Rank,
    RowParallelLinear,
    Step,
    TensorParallelEngine,
    VocabParallelEmbedding,
    build_share,
    cut,
    winners,
)
from tools.pictures.plots import bars
from tools.pictures.ranks import decode_ms, held, layer_flow, listen_in, wire
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
torch.set_num_threads(1)  # of the CPU's, for each rank, however many ranks there are

# %% [markdown]
# ## The three requests
#
# The engine starts a second process, which imports PyTorch and loads its part of the model: that takes some seconds.

# %%
engine = TensorParallelEngine(STORY_MODEL, **OPTIONS, tensor_parallel_size=2, on_event=(told := []).append)
outputs = engine.generate(prompts, params)
swimlane(told, names=NAMES, title="Stage 7: who runs when")

# %%
# NBVAL_CHECK_OUTPUT
before = record(ContinuousBatchingEngine, **OPTIONS)
without_times = [[{k: v for k, v in e.items() if k != "t"} for e in events] for events in (before.events, told)]
print("every event is the same as in stage 5:", without_times[0] == without_times[1])
print("processes that computed them:", 1 + len(engine.team.workers))

# %% [markdown]
# The picture of notebook 5, for the third time. The scheduler, the blocks and the prefix cache do not know that there
# are several ranks. They live in the process that you are talking to, the **leader**, which is rank 0 as well. The
# other one is its **worker**.
#
# ## What hurt
#
# A decode step reads all weights once. So a model has a weight that must fit, and a time that it takes to read:

# %%
# NBVAL_CHECK_OUTPUT
for name, billions in {"Qwen3-0.6B": 0.6, "Qwen3-8B": 8.2, "Llama-3.1-70B": 70.6, "Llama-3.1-405B": 405.0}.items():
    size = 2 * billions  # GB in bf16
    fits = next(n for n in (1, 2, 4, 8, 16) if size / n < 70)
    print(f"{name:15} {size:4.0f} GB, read in {size / 3.1:6.1f} ms by one H100; fits on {fits} of 80 GB")

# %% [markdown]
# The last two do not fit on one GPU, and a step of the one with 8 billion parameters cannot take less than 5 ms,
# whatever stage 6 does. Two GPUs have twice the memory, and read twice as fast.
#
# Layers could be dealt out instead: the first half here, the second half there (*pipeline parallelism*). Then it fits,
# but a token visits one GPU after the other, and reads no faster. We want all of them to work on the same token.
#
# ## Guess first
#
# The story model weighs 28 MiB in float32. **Guess:** how much does each of four ranks have to hold?

# %%
my_guess = None  # MiB

# %%
# NBVAL_CHECK_OUTPUT
mib = {}
for ranks in (1, 2, 4):
    with torch.device("meta"):  # shapes, but no memory
        share = build_share(engine.config, Group(0, ranks, torch.device("cpu")))
    mib[ranks] = sum(4 * p.numel() for p in share.parameters()) / 2**20
    print(f"{ranks} ranks: {mib[ranks]:5.2f} MiB each, {ranks * mib[ranks]:5.2f} MiB together")
compare(my_guess, mib[4], "MiB")

# %% [markdown]
# Half, and *nearly* a quarter. What is it that four ranks have more of than one? The pictures below show it.
#
# ## The idea: cut so that you need not talk
#
# An MLP is two matrices with something in between: *down(silu(gate(x)) · up(x))*. The 768 numbers in between are
# neurons, and each has nothing to do with the others. So give each rank half of the neurons: the *rows* of `gate_proj`
# and `up_proj` that compute them, and the *columns* of `down_proj` that use them. What a rank gets out is a part of a
# sum:

# %%
# NBVAL_CHECK_OUTPUT
mlp = ContinuousBatchingEngine(STORY_MODEL).model.layers[0].mlp
x = torch.randn(1, 256, generator=torch.Generator().manual_seed(0))
halves = [slice(0, 384), slice(384, 768)]
partial_sums = [
    (F.silu(x @ mlp.gate_proj.weight[half].T) * (x @ mlp.up_proj.weight[half].T)) @ mlp.down_proj.weight[:, half].T
    for half in halves
]
print("each rank's result:", [list(part.shape) for part in partial_sums])
print("their sum is the MLP's:", torch.allclose(sum(partial_sums), mlp(x), atol=1e-5))

# %% [markdown]
# Cutting a layer by its outputs is called **column parallel**, by its inputs **row parallel**. (The names are those of
# the Megatron paper, which writes *xW*. PyTorch keeps *W* transposed, so its columns are rows here. Everybody stumbles
# over this once.)
#
# The trick is the order. Column first, row second: nothing between the two ever leaves the rank, and *one* sum makes
# the result whole. Attention is cut the same way, with heads in place of neurons: each head has its rows of `q_proj`,
# `k_proj` and `v_proj`, its own keys and values in the cache, and its columns of `o_proj`.
#
# Here is one layer of the story model on two ranks, to scale. Outputs go down, inputs go across:

# %%
held(engine.config, 2)

# %% [markdown]
# And on four ranks. There are 4 query heads, but only 2 key/value heads: two ranks need the same one. So each has a
# *copy*: ranks 0 and 1 hold the same rows of `k_proj` and `v_proj`, and so do ranks 2 and 3. In the picture these two
# matrices are there twice. Now you know what four ranks have more of:

# %%
held(engine.config, 4)

# %%
# NBVAL_CHECK_OUTPUT
source(cut)

# %% [markdown]
# A column-parallel layer needs no code of its own: it is a layer with fewer outputs. A row-parallel one ends in a sum
# over the ranks, an **all-reduce**: everybody puts in a part, everybody gets the whole.

# %%
# NBVAL_CHECK_OUTPUT
source(RowParallelLinear)

# %% [markdown]
# Look at the last line. If every rank added the bias to its part, the sum would hold it twice.
#
# ### What crosses the wire
#
# The same layer as a path, on two ranks. The numbers are sizes of vectors; the red walls are where ranks meet:

# %%
layer_flow(engine.config, 2)

# %% [markdown]
# Norms are computed by everybody, as the hidden state is whole again on every rank. It is cheaper than to send it.
#
# Now count. The story model has 8 layers. **Guess:** how many times do the ranks meet in one decode step?

# %%
my_guess = None  # times

# %%
# NBVAL_CHECK_OUTPUT
crossings = listen_in(engine)
engine.trace.on_event = None
engine.generate([prompts[2]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
step = crossings[-(len(crossings) // 3) :]  # three steps: a prefill and two of decode
compare(my_guess, len(step), "times")
print("bytes from each rank:", sum(crossing.num_bytes for crossing in step))

# %%
wire(step, title="A decode step of one sequence, on two ranks")

# %% [markdown]
# Two for each layer, and two more, at both ends. They are about the vocabulary.
#
# ## The vocabulary
#
# The embedding is the largest matrix of this model: 4,096 × 256, and it serves as the head as well. It is cut by
# tokens. To look up a token, the rank that has it gives the vector, the others give zeros, and the first bar is their
# sum:

# %%
# NBVAL_CHECK_OUTPUT
source(VocabParallelEmbedding.forward)

# %% [markdown]
# At the other end each rank has the logits of its own tokens only. Must all of them be sent to the leader? For the
# greedy choice only the best of the best counts, so each rank sends two numbers: its highest logit and that token's id.
# That is the last bar, 16 bytes. Of equals the lowest id must win, as it does on one rank:

# %%
# NBVAL_CHECK_OUTPUT
best = torch.tensor([[[7.5, 3], [1.0, 9]], [[7.5, 2050], [2.0, 2052]]], dtype=torch.float64)  # [ranks, rows, 2]
print(winners(best))

# %%
# NBVAL_CHECK_OUTPUT
source(winners)

# %% [markdown]
# A vocabulary of 511 tokens on two ranks leaves one row over. It is filled with zeros, and then its *logit* is zero as
# well, which beats every real token when all logits happen to be negative. That is a real fault of real engines; the
# padding must be kept out of the contest.
#
# A row that is to be *drawn*, with a temperature, needs all logits: noise is added to each. Those rows are gathered.
#
# ## One message a step
#
# How do workers know what to do? The leader schedules, and sends one message to all of them, through a pipe to each.
# Here is the message for the second decode step of request C:

# %%
# NBVAL_CHECK_OUTPUT
with patch.object(engine.team, "tell", side_effect=engine.team.tell) as tell:
    engine.generate([prompts[2]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
messages = [call.args[0] for call in tell.call_args_list]
print(messages[-1])
print(len(pickle.dumps(messages[-1])), "bytes")

# %% [markdown]
# That is all. A worker knows no requests, no queues, no prefix cache, no sampling. It remembers nothing but keys and
# values, and so nobody has to tell it that a sequence was preempted, or resumed, or cut into chunks: whatever has
# happened to it, its next piece says where it starts, which tokens, and in which blocks.
#
# Tokens are not sent back either: what was chosen is in the next message.

# %%
# NBVAL_CHECK_OUTPUT
source(Piece, Step)

# %% [markdown]
# **Guess:** a sequence of 5,000 tokens is being decoded. How many bytes has the message now?

# %%
my_guess = None  # bytes

# %%
# NBVAL_CHECK_OUTPUT
known = list(range(5000))
long = Sequence(0, known, 10, SamplingParams(), seed=0, block_table=list(range(313)), num_computed=4999)
compare(my_guess, len(pickle.dumps(Step([Piece.of(long, 1)], [0], []))), "bytes")
print(f"with all that the leader knows of it: {len(pickle.dumps(long)):,} bytes")

# %% [markdown]
# Nearly all of it is the block table. What a rank does with a message is what stage 5 does in a step:

# %%
# NBVAL_CHECK_OUTPUT
source(Rank.__call__)

# %%
# NBVAL_CHECK_OUTPUT
source(Team.tell)

# %% [markdown]
# ## Is it right?
#
# Against `transformers`; and three rows that are drawn, against one rank with the same seeds:

# %%
# NBVAL_CHECK_OUTPUT
for name, ours, theirs in zip(NAMES, outputs, hugging_face_greedy(prompts, params), strict=True):
    print(f"{name}: identical to transformers: {ours == theirs}")
draws = [SamplingParams(temperature=t, max_tokens=12, seed=7) for t in (0.7, 1.0, 1.3)]
alone = record(ContinuousBatchingEngine, prompts, draws, **OPTIONS).outputs
print("drawn tokens are those of one rank:", engine.generate(prompts, draws) == alone)

# %% [markdown]
# In float32 on this model. Adding up in another order rounds differently; in bf16 two correct programs may differ where
# two tokens are almost equally likely.
#
# ## Is it fast?
#
# Two ranks on a CPU share the same cores and the same memory, so they cannot win here. What they show is the price
# (each rank has one thread, here as in the benchmark). **Guess:** of the time of a decode step on two ranks, how many
# percent is spent in the 18 collectives?

# %%
my_guess = None  # percent

# %%
single = TensorParallelEngine(STORY_MODEL, **OPTIONS, tensor_parallel_size=1)
times = [decode_ms(each, prompts[2]) for each in (single, engine)]
computing, meeting = zip(*times, strict=True)
compare(my_guess, 100 * meeting[1] / (computing[1] + meeting[1]), "percent")
bars(
    {"computing": computing, "in collectives": meeting},
    ["1 rank", "2 ranks"],
    xlabel="",
    ylabel="time of a decode step [ms]",
    title="The leader's time, on this CPU",
)

# %% [markdown]
# In a collective, a rank mostly waits: for the slower one, and for two operating-system processes to wake each other
# up. On GPUs with NVLink a sum of a few kilobytes takes some microseconds rather than a millisecond, and each rank has
# its own memory to read from.
#
# The showcase of this stage, as it was measured on a CPU (`make stage-7-bench`, and on a machine with several GPUs
# `make stage-7-bench ARGS="--device cuda"`):

# %%
show_table("stage_7", RESULTS)

# %% [markdown]
# Memory is all that the ranks gain here. On GPUs they gain time, too. This is not the stage but the engine, `nanovllm`,
# with a model of 8 billion parameters on one, two and four H200s, beside vLLM; then where a step goes; and what a sum
# takes by itself, through NCCL and in one exchange between GPUs that can write to each other's memory (docs/ranks.md):

# %%
show_table("tensor_parallel.h200", RESULTS)

# %% [markdown]
# ## When a rank dies
#
# Several processes can do what one cannot: fail by halves. Pull the plug of the worker:

# %%
# NBVAL_CHECK_OUTPUT
[worker] = engine.team.workers.values()
os.kill(worker.pid, signal.SIGKILL)
try:
    engine.generate(prompts, params)
except RuntimeError as error:
    print(error)

# %% [markdown]
# The leader hears of it through the pipe, whose other end has closed. It could not go on: half of every layer is gone,
# and half of the keys and values with it. What matters is that it says so at once, and that no process is left behind,
# however the engine ends:

# %%
# NBVAL_CHECK_OUTPUT
print("workers:", len(engine.team.workers))
engine.close()  # does nothing a second time

# %% [markdown]
# A worker that is only *stopped* (SIGSTOP) is not dead, and its pipe stays open. On a CPU that is noticed when the five
# minutes of `TIMEOUT` in `stages/ranks.py` are over; so long the leader waits in a sum. The engine `nanovllm` has a
# pulse for that: every rank shows one, and a rank without is given up within seconds.
#
# After Ctrl-C in the middle of a step the engine of this stage is closed as well, since the workers wait in a sum that
# nobody will finish. `nanovllm` waits for the end of the step, and can be used again.
#
# ## What still hurts
#
# Two sums a layer, and all ranks wait for the slowest. Across machines, where a sum takes much longer, it does not pay:
# there one cuts by layers. And on a GPU every rank launches its kernels one by one, as before stage 6. The engine in
# the package `nanovllm` is where all of it comes together.
#
# ## Your turn
#
# ```
# make stage-7-exercise                 # writes exercises/stage_7_tensor_parallel.py
# make stage-7-test IMPL=exercises      # tells you how you did
# ```

# %%
# NBVAL_CHECK_OUTPUT
list_exercises(7)

# %% [markdown]
# <details><summary>If you are stuck</summary>
#
# - **one rank's numbers**: the hidden size is not cut, nor is the size of a head. Look at the pictures.
# - **cutting**: `chunk` does nearly all of it. Which rank has which key/value head, if two share one? Neighbours, since
#   their query heads are neighbours.
# - **the embedding**: an id that is not yours is out of range. Look up any other row in its place, and then blank it.
# - **the best of a rank**: `masked_fill` before `argmax`, and take the logit from the masked scores: a rank may have
#   nothing but padding.
#
# </details>
#
# The tests first put the parts together on threads, without any process. `make stage-7-mutants` shows what the mistakes
# look like: several are invisible on every model that has no biases.
#
# **To think about.** (a) Could `down_proj` be cut by its outputs as well, without a sum? What would have to be sent
# instead, and how much? (b) With 8 key/value heads and 16 ranks, by how much does the KV cache of a rank shrink? (c)
# Each rank could draw from its own part, with noise added there, so that no logits need to be gathered. Why would the
# tokens be distributed right? (d) The sums of a prefill of 8,000 tokens are 8,000 times as large. Why do they matter
# less?
#
# ## Further reading
#
# - Shoeybi et al., [Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
#   Parallelism](https://arxiv.org/abs/1909.08053), 2019: column and row parallel layers, two sums a layer.
# - Pope et al., [Efficiently Scaling Transformer Inference](https://arxiv.org/abs/2211.05102), 2022: which way to cut,
#   for which batch size, with all the arithmetic.
# - NVIDIA's [NCCL documentation](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/collectives.html):
#   what an all-reduce and an all-gather are, in pictures.
# - In vLLM: `vllm/model_executor/layers/linear.py`, `vocab_parallel_embedding.py` beside it, and
#   `vllm/v1/executor/multiproc_executor.py`, whose shared-memory queue is our message.
#
# **Next:** [8. The engine](8_nanovllm.ipynb).
