# %% [markdown]
# # 13. Sliding windows: what a layer need not remember
#
# A text that is twice as long takes twice as many blocks, and each of its tokens reads twice as many keys. Must every
# layer look back to the very beginning? In Mistral 7B no layer does, and in Gemma 3 only every sixth does. The other
# layers see only the last keys, a fixed number of them. This is called a **sliding window**.
#
# You will see what a window hides, which blocks it sets free, why layers of different kinds need pools of their own,
# how the prefix cache changes, what a model loses, and how it still remembers more than its window.
#
# This chapter is an *elective*: it stands on stage 5, and no other chapter stands on it. Its model is the one that you
# know. It was trained without windows, and is given some here.
#
# Beside this notebook open `stages/electives/windows.py`; it holds the solutions of the exercises, so close it while
# you write your own.
#
# **About 30 minutes, and 30 minutes for the exercises.** You need notebook 5.

# %%
import random
import tempfile
from pathlib import Path

import torch

from nanovllm.engine.block_manager import BlockManager
from nanovllm.models.window_config import reach, sliding_window
from stages.checkpoint import read_config
from stages.core import SamplingParams
from stages.electives.windows import Pools, WindowEngine, WindowPool, oldest_key, see
from tools.pictures.plots import lines
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
from tools.pictures.windows import (
    losses,
    mask_picture,
    memory_in_use,
    pools_map,
    save_windows,
    spread,
    spread_picture,
)
from training.grammar import generate_story

tokenizer = load_tokenizer()
prompts, params = three_requests()
LAYERS = read_config(Path(STORY_MODEL)).num_hidden_layers

# %% [markdown]
# ## The three requests
#
# Six of the eight layers get a window of 16 keys. Layers 3 and 7, counted from 0, see the whole text:

# %%
MIXED = (16, 16, 16, 0) * 2
SMALL = {"max_num_seqs": SEATS, "block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "max_num_batched_tokens": 32}
run = record(WindowEngine, **SMALL, windows=MIXED, num_window_blocks=8)
swimlane(run.events, names=NAMES, title="Windows: who runs when")

# %% [markdown]
# The scheduler is that of stage 5. What is new happens in the blocks, and this picture does not show it.
#
# ## What hurt
#
# Keys and values of one text, in bf16, in models of the sizes of Qwen3:

# %%
# NBVAL_CHECK_OUTPUT
for name in ("Qwen3-0.6B", "Qwen3-8B"):
    c = read_config(ROOT / "benchmarks" / "shapes" / name)
    per_token = c.num_hidden_layers * 2 * c.num_key_value_heads * c.head_dim * 2
    sizes = (f"{tokens:,} tokens: {per_token * tokens / 1e9:.2f} GB" for tokens in (1000, 10_000, 100_000))
    print(f"{name:10}", ", ".join(sizes))

# %% [markdown]
# ## A window by hand
#
# With a window of W, the query at position i sees the keys from i - W + 1 to i. Its own key counts. It is easy to be
# off by one here, and nothing fails then: only the text differs. So count:

# %%
# NBVAL_CHECK_OUTPUT
positions = torch.arange(8)
print("keys      ", *positions.tolist())
for query, row in enumerate(see(positions[:, None], positions, 3).tolist()):
    print(f"query {query}:  ", *("x" if visible else "." for visible in row))

# %% [markdown]
# Now with blocks of four tokens:

# %%
mask_picture(24, (0, 9), 4)

# %% [markdown]
# The last query sees keys 15 to 23. Blocks 0 to 2 hold keys 0 to 11. This query does not see them, and no later one
# will, since the window only moves to the right. So these blocks can be given back while their request runs. Block 3
# must stay because key 15 is in it.

# %%
# NBVAL_CHECK_OUTPUT
source(see, oldest_key)

# %% [markdown]
# ## Which blocks are needed
#
# One function says which blocks of a text must be there. The engine asks it three times: which blocks to take before a
# step, which to give back after it, and which must be cached for a prefix hit.

# %%
# NBVAL_CHECK_OUTPUT
source(WindowPool.needed, Pools.release_unseen)

# %% [markdown]
# A block of stage 5 holds the keys and values of *all* layers. In a model with two kinds of layers it could never be
# given back early: the layers that see all still need their part of it. So each kind of layers gets a pool. A block of
# a pool holds the keys and values of these layers alone. For each sequence the pool has a table, which says where block
# i of the text lies. The table is a dict, because the first blocks of a text may be missing.

# %%
small = WindowEngine(STORY_MODEL, **SMALL, windows=MIXED, num_window_blocks=8)
pools_map(run.events, small, NAMES)

# %% [markdown]
# Above are the two layers that see all: blocks are held to the end of a request, as always. Below are the six layers
# with a window: no request holds more than a few blocks, whatever its length. A and B share their beginning in both
# pools.
#
# ## Guess first
#
# A story of 30 tokens goes on for 320 more, in blocks of 16 tokens. Without a window the request holds 22 blocks at the
# end. Now the window is 64 keys. How many blocks does the request hold at most in a layer with this window?

# %%
my_guess = None  # blocks

# %%
text = tokenizer.encode(generate_story(random.Random(0), held_out=True).text).ids
kinds = {
    "no windows": (0,) * LAYERS,
    "windows in 3 of 4 layers": (64, 64, 64, 0) * 2,
    "windows everywhere": (64,) * LAYERS,
}
long_answer = SamplingParams(temperature=0, max_tokens=320, ignore_eos=True)
memory = {}
for name, windows in kinds.items():
    told = []
    engine = WindowEngine(STORY_MODEL, windows=windows, num_blocks=32, on_event=told.append)
    engine.generate([text[:30]], long_answer)
    memory[name] = memory_in_use(told, engine)
block = memory["no windows"][-1] / 22  # bytes
compare(my_guess, max(memory["windows everywhere"]) / block, "blocks")

# %% [markdown]
# 64 keys fill four blocks. But the window rarely begins where a block does, so mostly there is a fifth block. This is
# the memory of all three runs, step by step:

# %%
curves = {name: (range(1, 1 + len(used)), [n / 1e6 for n in used]) for name, used in memory.items()}
lines(curves, xlabel="step", ylabel="keys and values [MB]", title="KV memory of one long answer")

# %%
# NBVAL_CHECK_OUTPUT
for name, used in memory.items():
    print(f"{name:25} {max(used) / 1e6:.2f} MB at most, {max(used) / max(memory['no windows']):.0%}")

# %% [markdown]
# With windows everywhere, memory stops growing. With windows in three of four layers it grows a quarter as fast. In a
# long text nearly all of the memory belongs to the layers that see all.
#
# A long *prompt* gains as well. The layers with a window never get blocks for all of it, only for what one step
# computes and what its queries see. So the prompt may be much longer than their pool.
#
# ## What is lost
#
# These stories are new to the model, and it was trained without windows. How much larger is its loss if every layer
# sees only 64 keys? The loss is counted from token 150 on, where all windows but the largest hide something.

# %%
my_guess = None  # times as large

# %%
tales = [generate_story(random.Random(seed), held_out=True).text for seed in (1, 3, 4, 8)]
texts = [tokenizer.encode(tale).ids[:350] for tale in tales]
sizes = (8, 16, 32, 64, 128, 256)
loss = {size: losses(STORY_MODEL, (size,) * LAYERS, texts, first=150) for size in (0, *sizes)}
compare(my_guess, loss[64] / loss[0], "times the loss without windows")

# %%
curves = {
    "windows in all layers": (sizes, [loss[size] for size in sizes]),
    "no windows": (sizes, [loss[0]] * len(sizes)),
}
picture = lines(curves, xlabel="window [keys]", ylabel="loss [nats per token]", title="A window that was not trained")
picture.axes[0].set_xscale("log", base=2)
picture.axes[0].set_xticks(sizes, [str(size) for size in sizes])
picture

# %% [markdown]
# In these stories a name or a colour still matters a hundred tokens later. This model has learned to look it up where
# it stands. A model that is trained with windows learns to pass on what it will need. Such a model, too, must be used
# with the windows that it was trained with.
#
# Let one layer of the eight see all, and give the others a window of 16. Which one should it be?

# %%
my_guess = None  # layer, from 0

# %%
one_sees_all = [
    losses(STORY_MODEL, [0 if i == layer else 16 for i in range(LAYERS)], texts, 150) for layer in range(LAYERS)
]
compare(my_guess, one_sees_all.index(min(one_sees_all)), "is the layer that needs the whole text most")

# %%
for layer, found in enumerate(one_sees_all):
    print(f"layer {layer} sees all: loss {found:.2f}")
print(f"all have the window: {loss[16]:.2f}")

# %% [markdown]
# ## How it remembers more than its window
#
# Change one token of a text, at position 10, and look at the hidden states of all later positions. All eight layers
# have a window of 8 keys. Up to which position does the state after the last layer change?

# %%
my_guess = None  # position

# %%
other = tokenizer.encode("fox").ids[0]
changes = spread(STORY_MODEL, (8,) * LAYERS, text[:96], changed=10, token=other)
compare(my_guess, changes[-1].nonzero().max().item(), "is the last position with another state")

# %%
# NBVAL_CHECK_OUTPUT
for layer, row in enumerate(changes):
    print(f"above {layer} layers: positions {row.nonzero().min().item()} to {row.nonzero().max().item()}")

# %%
spread_picture(changes, 10, "What becomes of one changed token")

# %% [markdown]
# A layer passes a token on by up to 7 positions. The next layer reads that state and passes it on by 7 more: 10 + 8 x 7
# is 66. So L layers with a window of W reach L x (W - 1) tokens back: 32 layers with windows of 4,096 keys, as in
# Mistral 7B, reach about 131,000. How much of a token is left after so many steps is another question: the picture
# fades to the right.
#
# The information is passed on in keys and values. What they took in from tokens before the window stays in them, even
# when the blocks of those tokens are gone.
#
# ## A cached beginning
#
# So what does a prefix hit need? In stage 4 it needed every block of the beginning. Here a prompt of 321 tokens is
# computed in a pool of only 8 blocks, with a window of 32 in all layers. So most of its blocks have been reused before
# the prompt ends. Then the same prompt comes a second time. How many of its tokens must be computed?

# %%
my_guess = None  # tokens

# %%
prompt = (text * 3)[:321]
told = []
engine = WindowEngine(
    STORY_MODEL, windows=(32,) * LAYERS, num_blocks=8, max_num_batched_tokens=64, on_event=told.append
)
for _ in range(2):
    engine.generate([prompt], SamplingParams(temperature=0, max_tokens=1))
hits = [event["cached"] for event in told if event["type"] == "admitted"]
compare(my_guess, len(prompt) - hits[-1], "token")

# %%
# NBVAL_CHECK_OUTPUT
shared = [len(event["shared"]) for event in told if event["type"] == "blocks" and event["shared"]]
print(f"cached: {hits[0]} tokens for the first request, {hits[1]} for the second, by {shared[0]} shared blocks")

# %% [markdown]
# Two blocks are enough for 320 tokens! The next query, at position 320, sees keys 289 to 320, and no query will look at
# the rest again. But the name of a block must still stand for *everything* before it, also for tokens whose blocks are
# gone: its keys and values depend on those tokens. Here such a name is an object, a `Beginning`. It points to the
# beginning before it, and it outlives the blocks.
#
# With several kinds of layers, a beginning counts only if every kind has what it needs, and the longest such beginning
# is taken:

# %%
# NBVAL_CHECK_OUTPUT
source(Pools.find_beginning)

# %% [markdown]
# Another prompt may share only the first half of this text. Then it needs the blocks just before the place where the
# two texts begin to differ. These blocks were given back early, so they are the first to be reused.
#
# ## Is it right?
#
# Write the same windows into a `config.json`, and let transformers load it:

# %%
# NBVAL_CHECK_OUTPUT
with tempfile.TemporaryDirectory() as folder:
    expected = hugging_face_greedy(prompts, params, save_windows(STORY_MODEL, Path(folder), MIXED))
for name, ours, theirs in zip(NAMES, run.outputs, expected, strict=True):
    print(f"{name}: {len(ours)} tokens, identical to transformers: {ours == theirs}")

# %% [markdown]
# ## In the real engine
#
# `nanovllm` has one pool for all layers. If all of them have a window, the largest window decides what is given back.
# If a single layer sees all, `reach` is 0, and nothing is given back early. There a window saves reading, but no
# memory:

# %%
# NBVAL_CHECK_OUTPUT
source(sliding_window, reach)

# %%
# NBVAL_CHECK_OUTPUT
source(BlockManager.release_unseen)

# %% [markdown]
# Its tables are lists, which a GPU can read, so a block that was given back keeps its place in the list. And a hit
# needs the whole beginning, as in stage 4. [Attention](../docs/attention.md) says how the kernels skip
# the keys before a window.
#
# ## What still hurts
#
# Two pools of fixed sizes cannot lend each other memory: with many short texts one of them is full while the other is
# half empty. vLLM's hybrid KV cache manager gives blocks of all kinds one size, so that one pool serves them. And what
# the layers that see all must keep still grows with the text.
#
# ## Your turn
#
# ```
# make elective-windows-exercise                 # writes exercises/electives/windows.py
# make elective-windows-test IMPL=exercises ARGS=-x      # tells you how you did, up to the first failure
# ```

# %%
# NBVAL_CHECK_OUTPUT
list_exercises("windows")

# %% [markdown]
# <details><summary>If you are stuck</summary>
#
# - **the mask**: `keys` and `queries` are positions, and broadcast against each other. Two comparisons, joined by `&`.
# - **the needed blocks**: which block holds the oldest key? And a `range` ends *before* its second number.
# - **the beginning**: `pool.needed(n, n)` with n tokens computed. For a window these are a few blocks before block
#   `count`, and for layers that see all it is every block before it.
#
# </details>
#
# `make elective-windows-mutants` shows what goes wrong when one of these is *almost* right.
#
# **To think about.** (a) With a window of 1 in all layers, a cached beginning needs no block at all. Why is that right?
# (b) Why may a block that is not full never be given back early? (c) A request is preempted. Which of its blocks can it
# still find when it comes back, in either pool? (d) What would a pool for each *layer* cost?
#
# ## Further reading
#
# - Beltagy et al., [Longformer](https://arxiv.org/abs/2004.05150), 2020. Windows, and a few positions that see all.
# - Jiang et al., [Mistral 7B](https://arxiv.org/abs/2310.06825), 2023. A window in all layers, and a cache that rolls.
# - Gemma Team, [Gemma 3 Technical Report](https://arxiv.org/abs/2503.19786), 2025. Five layers with a window for each
#   that sees all, and what this does to memory and loss.
# - Xiao et al., [Efficient Streaming Language Models with Attention Sinks](https://arxiv.org/abs/2309.17453), 2023. Why
#   a model that was trained without windows breaks when its first tokens go out of sight.
# - In vLLM: `vllm/v1/core/single_type_kv_cache_manager.py`, which has a class for each kind of layer.
