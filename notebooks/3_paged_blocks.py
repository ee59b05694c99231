# %% [markdown]
# # 3. Paged blocks: memory in small pieces
#
# Stage 2 stores keys and values in one rectangle: a row for each sequence, every row as long as the longest may become.
# That is how programs got their memory in the 1950s, one contiguous piece each, and it failed for the same reason:
# nobody knows beforehand how much they will need. Operating systems found the way out in 1962, and inference engines
# found it again in 2023: **pages**.
#
# Beside this notebook open `stages/stage_3_paged_blocks.py`; it holds the solutions of the exercises, so close it while
# you write your own. `make stage-3-diff` shows what changed, solutions as well.
#
# **About 25 minutes, and 35 minutes for the exercises.** You need notebook 2.

# %%
import itertools
import json

from stages.core import SamplingParams, Sequence
from stages.stage_2_kv_cache import KVCacheEngine
from stages.stage_3_paged_blocks import BlockPool, PagedEngine, PagedKVCache, gather_attention, slots_of
from tools.pictures.blocks import block_map, cache_growth, holdings, pool_slots, waste
from tools.pictures.steps import swimlane
from tools.pictures.three_requests import (
    BLOCK_SIZE,
    NAMES,
    NUM_BLOCKS,
    ROOT,
    SEATS,
    compare,
    hugging_face_greedy,
    list_exercises,
    load_tokenizer,
    record,
    source,
    three_requests,
)
from tools.pictures.timeline import slot_use

prompts, params = three_requests()

# %% [markdown]
# ## The three requests
#
# A and B begin alike and want 8 and 24 tokens, C is short and wants 16; two may run at a time. In stage 3:

# %%
three = record(PagedEngine, max_num_seqs=SEATS, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
swimlane(three.events, names=NAMES, title="Stage 3")

# %% [markdown]
# *Who runs when* is what it was in stage 2: a static batch, and C waits for the slowest. What is new is *where things
# lie*. Memory is now a pool of 14 **blocks** with room for 16 tokens each. A step on the x axis, a block on the y axis:

# %%
block_map(three.events, NUM_BLOCKS, names=NAMES)

# %% [markdown]
# A takes four blocks, B five, and when A is over its four are free at once, although the batch goes on.
#
# ## What hurt
#
# Stage 2 made one rectangle for a batch, as long as the longest sequence may become. Three similar requests fit such a
# rectangle tolerably. Real traffic is not similar: most requests are short, a few are long, and the rectangle is made
# for the longest. So here is a workload like that: sixteen openings of stories, cut to length, every fourth long.

# %%
# NBVAL_CHECK_OUTPUT
lengths = [(16, 8), (20, 4), (12, 12), (96, 32)] * 4  # (prompt tokens, tokens to generate)
tokenizer = load_tokenizer()
stories = json.loads((ROOT / "tests" / "data" / "story_prompts.json").read_text(encoding="utf-8"))["prompts"]
texts = ["\n\n".join(stories[i : i + 3]) for i in range(len(lengths))]
mixed = [tokenizer.encode(text).ids[:n] for text, (n, _) in zip(texts, lengths, strict=True)]
mixed_params = [SamplingParams(temperature=0, max_tokens=m, ignore_eos=True) for _, m in lengths]
ROWS, COLUMNS = 4, 96 + 32
print(f"a rectangle for {ROWS} sequences: {ROWS} x {COLUMNS} = {ROWS * COLUMNS} slots")
print(f"all sixteen together will ever fill {sum(n + m - 1 for n, m in lengths)}")

# %% [markdown]
# A **slot** has room for the keys and values of one token, in every layer. (Minus one each, for the last token is never
# fed back into the model, and so never gets a key and a value.) The first four of them in stage 2; the black line is
# what was set aside:

# %%
first_four = record(KVCacheEngine, mixed[:4], mixed_params[:4], max_num_seqs=ROWS)
cache_growth(first_four.events, reserved=ROWS * COLUMNS, title="Stage 2: the rectangle, and what is in it")

# %% [markdown]
# The white is memory that nobody can use: most of the rows of the short ones from the beginning, and all of them once
# they are over.
#
# ## Guess first
#
# In 512 slots stage 2 runs four of the sixteen at a time, and no more. Stage 3 gets the same memory, as 32 blocks of
# 16 slots. How many of them will it run at a time? They are admitted in the order of the list, and each
# reserves its prompt and all of its output.

# %%
my_guess = None  # sequences at once

# %%
# NBVAL_CHECK_OUTPUT
rectangle = record(KVCacheEngine, mixed, mixed_params, max_num_seqs=ROWS)
paged = record(PagedEngine, mixed, mixed_params, block_size=BLOCK_SIZE, num_blocks=32)
at_once = {}
for name, events in {"stage 2": rectangle.events, "stage 3": paged.events}.items():
    changes = [{"admitted": 1, "finished": -1}.get(event["type"], 0) for event in events]
    at_once[name] = max(itertools.accumulate(changes))
    print(f"{name}: {at_once[name]} sequences at once, {max(e['step'] for e in events)} steps for all")
print("same tokens:", rectangle.outputs == paged.outputs)
compare(my_guess, at_once["stage 3"], "sequences at once")

# %% [markdown]
# More sequences in each step means fewer steps, and a step with ten tokens costs hardly more than one with four, as you
# saw in notebook 2. That is why memory matters to speed.
#
# ## The idea, in pictures
#
# 1. Cut the memory into blocks of a few slots.
# 2. Each sequence keeps a list of the blocks it owns, in the order of its text: its **block table**.
# 3. Token number `p` of a sequence lies in block `p // block_size` *of its table*, at offset `p % block_size`.
#
# Here is the whole pool in step 6 of the three requests. The number in a slot is the position of its token:

# %%
pool_slots(three.events, NUM_BLOCKS, BLOCK_SIZE, step=6, names=NAMES)

# %% [markdown]
# The hatched slots are all that is wasted: room for tokens that are still to come, and the rest of a last block. No
# sequence ever wastes as much as one block at its end, however long another one is.
#
# Slots are numbered through the pool, so slot = block x block size + offset. Do one by hand before you run the cell:
# where is token 37 of B? Find it in the picture, too.

# %%
# NBVAL_CHECK_OUTPUT
[table] = [holding.table for holding in holdings(three.events, step=6) if NAMES[holding.request] == "B"]
position = 37
index, offset = position // BLOCK_SIZE, position % BLOCK_SIZE
print(f"block table of B: {table}")
print(f"token {position} is in block number {index} of the table, which is block {table[index]}, at offset {offset}")
print(f"slot: {table[index]} x {BLOCK_SIZE} + {offset} = {table[index] * BLOCK_SIZE + offset}")

b = Sequence(1, prompts[1], len(prompts[1]), params[1], seed=0, block_table=table)
print(f"the engine's own answer: {slots_of(b, position, position + 1, BLOCK_SIZE)}")
print(f"and for tokens 45 to 50: {slots_of(b, 45, 51, BLOCK_SIZE)}")

# %% [markdown]
# ### Fragments do not matter any more
#
# In the picture above every table is a run of neighbours, since the pool was new. Now the sixteen requests, in their
# 32 blocks. They come and go in different orders, and after a while the free blocks are scattered:

# %%
pool_slots(paged.events, 32, BLOCK_SIZE, step=40)

# %%
# NBVAL_CHECK_OUTPUT
for holding in holdings(paged.events, step=40):
    print(f"request {holding.request:2d}: {holding.length:3d} tokens in blocks {holding.table}")

# %% [markdown]
# Follow request 11 through the pool: 16, 17, 30, 31, 0, 1, 14, 15. Four scattered pairs, and no trouble. In a world of
# contiguous pieces there may be enough memory, but not in one piece, and somebody has to be moved out of the way. That
# is *external fragmentation*, and it is gone: all blocks are alike, so any free block will do.
#
# ## The code
#
# `stages/stage_3_paged_blocks.py`, piece by piece. The pool knows no tensors: a block is a number, and the free list is
# a queue of numbers. A sequence gets all that it asks for or nothing:

# %%
# NBVAL_CHECK_OUTPUT
source(BlockPool.allocate, BlockPool.release)

# %% [markdown]
# You did this one by hand:

# %%
# NBVAL_CHECK_OUTPUT
source(slots_of)

# %% [markdown]
# The cache is one tensor for each of keys and values. Laid flat it is a list of slots, so writing is one indexed
# assignment. Then `batch.attention` *gathers* the slots of a sequence into one contiguous piece and continues as in
# stage 2:

# %%
# NBVAL_CHECK_OUTPUT
source(PagedKVCache.attend, gather_attention)

# %% [markdown]
# And the step. Nothing is padded: the new tokens of all sequences lie end to end, because the model only cares about
# tokens, and `attend` is the only place that knows which sequence a token is from:

# %%
# NBVAL_CHECK_OUTPUT
source(PagedEngine.step)

# %% [markdown]
# The gather is a copy, and so this stage pays for its memory with time in attention. A kernel can do without: it reads
# the block table and goes to the blocks where they lie. `stages/paged_attention_triton.py` is such a kernel, in 200
# lines with its explanation. It is optional reading, and its tests run on a CPU too, in Triton's interpreter.
#
# ## Is it right?

# %%
# NBVAL_CHECK_OUTPUT
expected = hugging_face_greedy(prompts, params)
for name, ours, theirs in zip(NAMES, three.outputs, expected, strict=True):
    print(f"{name}: {len(ours)} tokens, identical to transformers: {ours == theirs}")

# %% [markdown]
# ## Is it frugal?
#
# Both engines on the sixteen requests, with 512 slots each. How much of what was set aside held a token?

# %%
# NBVAL_CHECK_OUTPUT
use = {
    "stage 2": slot_use(rectangle.events, reserved=ROWS * COLUMNS),
    "stage 3": slot_use(paged.events, block_size=BLOCK_SIZE),
}
for name, slots in use.items():
    empty = 1 - sum(u.used for u in slots) / sum(u.reserved for u in slots)
    print(f"{name}: {empty:.0%} of the slots set aside were empty, averaged over the run")

# %%
waste(use)

# %% [markdown]
# Look at what is left in stage 3. Most of it is not the rest of a last block, but room reserved for output that is yet
# to be written. (Stage 5 will stop reserving it.) The rest of the last blocks depends on the block size:

# %%
# NBVAL_CHECK_OUTPUT
needed = sum(n + m - 1 for n, m in lengths)
for size in (1, 4, 16, 64, 128):
    pool = BlockPool(num_blocks=512, block_size=size)
    taken = size * sum(pool.num_blocks_for(n + m - 1) for n, m in lengths)
    print(f"blocks of {size:3d}: {taken:5d} slots for {needed} tokens, {1 - needed / taken:4.0%} never filled")

# %% [markdown]
# With blocks of 128 we are back at stage 2's rectangle. Why not blocks of one slot, then? Because a table entry for
# every token has to be kept and read, a kernel likes to read neighbours in one go, and stage 4 will name each block.
# vLLM's default is 16, as is ours.
#
# **Where this gains nothing.** If all sequences are equally long and end together, the rectangle fits exactly, and
# stage 3 only adds the gather.
#
# ## What still hurts
#
# Look at the pool in step 6 again, at the first three blocks of A and the first three of B. They hold the *same text*,
# and so the same keys and values: computed twice, stored twice. Nothing in a block table forbids two sequences to own
# one block. Stage 4 shares them.
#
# ## Your turn
#
# ```
# make stage-3-exercise                 # writes exercises/stage_3_paged_blocks.py
# make stage-3-test IMPL=exercises      # tells you how you did
# ```

# %%
# NBVAL_CHECK_OUTPUT
list_exercises(3)

# %% [markdown]
# <details><summary>If you are stuck</summary>
#
# - **`allocate`**: all or nothing. Whoever takes two blocks and then finds that the third is missing has to put the two
#   back. So count first. And a sequence may have some blocks already.
# - **`slots_of`**: you did it by hand above. `//` says which entry of the table, `%` says where in the block.
# - **the gather**: `r.context_slots` is a tensor of slots, and a flat cache can be indexed with it in one go. The rest
#   is stage 2's attention.
#
# </details>
#
# `make stage-3-mutants` shows what goes wrong when one of these is *almost* right.
#
# **To think about.** (a) Give the sixteen requests 64 blocks of 8 slots, the same memory. How many run at once? Change
# the cell and see. (b) Reverse `lengths`, long ones first. Stage 2 stays at four; why does stage 3 not stay at ten?
# (c) Why may the free list hand out blocks in any order, but a block table must keep its order?
#
# ## Further reading
#
# - Kwon et al., [Efficient Memory Management for Large Language Model Serving with
#   PagedAttention](https://arxiv.org/abs/2309.06180), 2023. Its figure 2 is the waste measured above, in three systems
#   of the time: only 20 to 38 % of KV memory held anything.
# - Kilburn et al., *One-Level Storage System*, 1962: paging, invented for the Atlas computer.
# - In vLLM: `vllm/v1/core/block_pool.py` (free list), `vllm/v1/core/kv_cache_manager.py` (`allocate_slots`), and
#   `vllm/v1/worker/block_table.py`, where slots are computed from positions as you did.
#
# **Next:** [4. Prefix caching](4_prefix_caching.ipynb).
