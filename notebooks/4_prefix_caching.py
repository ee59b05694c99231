# %% [markdown]
# # 4. Prefix caching: never read the same page twice
#
# A chat sends its whole past with every message. A company's assistant opens every conversation with the same two pages
# of instructions. Millions of requests begin alike, and stage 3 computes each of these beginnings anew, although the
# result lies in a block a few rows further down.
#
# This notebook is about recognising it. The trick is a *name* for the contents of a block, and the notebook ends with
# what happens if the name is chosen carelessly: you will see a dormouse become a fox.
#
# Beside this notebook open `stages/stage_4_prefix_caching.py`; it holds the solutions of the exercises, so close it
# while you write your own. `make stage-4-diff` shows what changed, solutions as well.
#
# **About 30 minutes, and 50 minutes for the exercises.** You need notebook 3.

# %%
import json
import random
from unittest.mock import patch

from stages import stage_4_prefix_caching as stage_4
from stages.core import SamplingParams
from stages.stage_3_paged_blocks import PagedEngine
from stages.stage_4_prefix_caching import Content, PrefixCachingEngine, PrefixCachingPool, chained_digest
from tools.pictures.blocks import block_map, prefix_tree, ref_counts
from tools.pictures.plots import bars
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
run = record(PrefixCachingEngine, max_num_seqs=SEATS, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
swimlane(run.events, names=NAMES, title="Stage 4: who runs when")

# %% [markdown]
# Look at the dark box of B. In stage 3 it had 53 tokens, now it has 5: the other 48 were there already, because A had
# computed them one step earlier. (That is why prompts now go one after another: B can only find what is finished.)
# Where do they lie?

# %%
block_map(run.events, NUM_BLOCKS, names=NAMES, remember=True)

# %% [markdown]
# Striped: blocks 0, 1 and 2 belong to A *and* B. When A is over, they are still B's. And pale is the second novelty: a
# block that nobody owns any more is free, but its contents stay, until somebody else needs the block.
#
# ## What hurt
#
# Here are the three prompts, cut into blocks, with equal beginnings drawn once. Only full blocks (solid frames) can be
# shared: the last one is still being written to.

# %%
prefix_tree(prompts, BLOCK_SIZE, tokenizer.decode, names=NAMES)

# %%
# NBVAL_CHECK_OUTPUT
before = record(PagedEngine, max_num_seqs=SEATS, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
for name, events in {"stage 3": before.events, "stage 4": run.events}.items():
    prompt_tokens = sum(e["tokens"] for e in events if e["type"] == "scheduled" and e["tokens"] > 1)
    blocks = sum(len(e["taken"]) for e in events if e["type"] == "blocks")
    print(f"{name}: {prompt_tokens} prompt tokens computed, {blocks} blocks taken")

# %% [markdown]
# ## Guess first
#
# Now something longer. Five people ask about the same story, which has about 500 tokens, one after the other:

# %%
# NBVAL_CHECK_OUTPUT
drawn = (generate_story(random.Random(seed)).text for seed in range(100))
story = next(text for text in drawn if 480 <= len(tokenizer.encode(text).ids) <= 520)
stories = json.loads((ROOT / "tests" / "data" / "story_prompts.json").read_text(encoding="utf-8"))["prompts"]
chats = [tokenizer.encode(f"{story}\n\n{end}").ids for end in stories[:5]]
print(f"the story: {len(tokenizer.encode(story).ids)} tokens; the five prompts: {[len(chat) for chat in chats]}")

# %% [markdown]
# The first has to compute everything. **Guess:** how many times sooner does the second one get its first token?

# %%
my_guess = None  # times sooner

# %%
first_token: dict[str, list[float]] = {}
for name, engine_class in {"stage 3": PagedEngine, "stage 4": PrefixCachingEngine}.items():
    engine = engine_class(STORY_MODEL, num_blocks=64, on_event=(events := []).append)
    engine.generate([tokenizer.encode(stories[9]).ids], SamplingParams(max_tokens=2))  # to warm up: another story
    events.clear()
    for chat in chats:
        engine.generate([chat], SamplingParams(temperature=0, max_tokens=1))
    start, end = ([e["t"] for e in events if e["type"] == kind] for kind in ("added", "token"))
    first_token[name] = [1000 * (b - a) for a, b in zip(start, end, strict=True)]
compare(my_guess, first_token["stage 4"][0] / first_token["stage 4"][1], "times sooner")
bars(
    first_token,
    range(1, 6),
    xlabel="prompt, in order of arrival",
    ylabel="time to first token [ms]",
    title="Five prompts about one story",
)

# %% [markdown]
# The first prompt pays in full, the others only for what is new.
#
# ## The idea: a name for what is in a block
#
# To share a block, the engine must find out that it has it. Comparing the prompt with everything in memory would be
# slow, so each full block gets a name, a hash, and a dictionary leads from names to blocks.
#
# A hash of what? Not of its sixteen tokens alone. Keys and values depend on *everything before them*, as the model has
# read it all when it comes to this block. "He had a fine red scarf" means something else after "a dormouse named Kofi"
# than after "a fox named Bruno". So the name of a block is the hash of its tokens **and of the name of the block before
# it**. That one contains the name before, and so on: a chain to the beginning of the text.

# %%
# NBVAL_CHECK_OUTPUT
for name, prompt in zip(NAMES, prompts, strict=True):
    digest = 0
    for start in range(0, len(prompt) - BLOCK_SIZE + 1, BLOCK_SIZE):
        tokens = tuple(prompt[start : start + BLOCK_SIZE])
        digest = chained_digest(digest, tokens)
        print(f"{name}, block {start // BLOCK_SIZE}: {digest:016x}  {tokenizer.decode(list(tokens))[:44]!r}…")
print(f"the last one's tokens at the beginning of a text: {chained_digest(0, tokens):016x}")

# %% [markdown]
# The names of A and B agree, block for block. C has not one full block, and so no name. The last line is what the same
# sixteen tokens would be called if nothing came before them: something else entirely.
#
# ### Who owns a block: reference counts
#
# A block with two owners must not be handed out when the first of them leaves. So each block has a count of its owners:
# one up for each sequence that takes it, one down for each that is over, free at zero.

# %%
ref_counts(run.events, NUM_BLOCKS)

# %% [markdown]
# ### What is forgotten: the least recently used
#
# Contents outlive their owners, but memory is finite. Blocks are handed out from the front of the free list and come
# back at its end, so what has been free for longest goes first (LRU). A pool of 8 blocks, one seat, four requests: A,
# then C, then somebody else, D, and then A again.

# %%
other = tokenizer.encode(stories[3]).ids
lru = record(
    PrefixCachingEngine,
    [prompts[0], prompts[2], other, prompts[0]],
    [params[0], params[2], SamplingParams(temperature=0, max_tokens=4), params[0]],
    max_num_seqs=1,
    block_size=BLOCK_SIZE,
    num_blocks=8,
)
lru_names = ["A", "C", "D", "A again"]
block_map(lru.events, 8, names=lru_names, remember=True, title="A pool of eight blocks")

# %%
# NBVAL_CHECK_OUTPUT
for event in lru.events:
    name = lru_names[event["request"]]
    if event["type"] == "blocks" and event["freed"]:
        print(f"{name:8} gives back {event['freed']}")
    elif event["type"] == "blocks":
        print(f"{name:8} shares {event['shared']}, takes {event['taken']}")

# %% [markdown]
# D needed four blocks. Two had never been used, 6 and 7; the other two it took from A, but only 3 and 2, the *end* of
# A's text. A gave its blocks back from the last to the first, so that the end is forgotten first. That is no accident:
# without its beginning the end would be of no use to anybody, for nobody could walk the chain to it. So A again finds
# blocks 0 and 1, two of its three full blocks, and not nothing.
#
# ## The code
#
# The name. xxhash is fast, 64 bits wide, and takes bytes:

# %%
# NBVAL_CHECK_OUTPUT
source(chained_digest)

# %% [markdown]
# The walk along the chain, until a name is unknown. Two lines deserve a second look. `len(seq.token_ids) - 1`: at least
# one token must be computed, or there would be no logits to choose the next token from. And the comparison: even if the
# name is known, tokens and parent are compared as well. Hashes can collide.

# %%
# NBVAL_CHECK_OUTPUT
source(PrefixCachingPool.find_prefix)

# %% [markdown]
# Taking and giving back. Where the order matters, the comment says why:

# %%
# NBVAL_CHECK_OUTPUT
source(PrefixCachingPool.allocate, PrefixCachingPool.release)

# %% [markdown]
# The engine itself is stage 3's, with these two methods. A block is named *after* the step that fills it, and `publish`
# names no more than is computed: a name given earlier would lead to whatever the block held before.

# %%
# NBVAL_CHECK_OUTPUT
source(PrefixCachingEngine.start_batch, PrefixCachingEngine.step)

# %% [markdown]
# ## Is it right?
#
# Against `transformers`, twice on one engine: the second time, the cache is warm.

# %%
# NBVAL_CHECK_OUTPUT
engine = PrefixCachingEngine(STORY_MODEL, max_num_seqs=SEATS, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
cold, warm = engine.generate(prompts, params), engine.generate(prompts, params)
for i, theirs in enumerate(hugging_face_greedy(prompts, params)):
    print(f"{NAMES[i]}: identical to transformers: cold {cold[i] == theirs}, warm {warm[i] == theirs}")

# %% [markdown]
# ## Is it the cache?
#
# A gain should go away when its cause is taken away. The five prompts once more, with the cache turned on and off. Off
# is easy: blocks that never get a name are never found, so we replace `publish` by a function that does nothing.

# %%
# NBVAL_CHECK_OUTPUT
on = record(PrefixCachingEngine, chats, SamplingParams(temperature=0, max_tokens=2), num_blocks=256)
with patch.object(PrefixCachingPool, "publish", lambda pool, seq: None):
    off = record(PrefixCachingEngine, chats, SamplingParams(temperature=0, max_tokens=2), num_blocks=256)
for name, told in {"cache on": on, "cache off": off}.items():
    computed = sum(e["tokens"] for e in told.events if e["type"] == "scheduled")
    found = [e["cached"] for e in told.events if e["type"] == "admitted"]
    print(f"{name:9} {computed:5,} tokens computed, found in the cache: {found}")
print("same tokens:", on.outputs == off.outputs)

# %% [markdown]
# Where prompts have nothing in common, nothing is gained. Hashing then costs so little that vLLM has the cache turned
# on by default. In this stage there is a higher price: prompts go through the model one after another, so that the
# second can find the first, where stage 3 computes them together. `make stage-4-bench` measures it, and the next
# stage repairs it.
#
# ## A bug that you can read
#
# What if the name did *not* contain the parent? Let us try. In this stage two things stand against it: the chain in the
# hash, and the comparison of the parent in `Content.matches`. We take away both. Three requests, one after the other:
#
# 1. a story about **a dormouse named Kofi**, with a red scarf;
# 2. a story about **a fox named Bruno**, with a green locket;
# 3. a story about **a dormouse named Kofi**, with a green locket.
#
# The first block of number 3 is known from number 1. The later ones have *the same tokens* as those of number 2, but
# stand behind another beginning.

# %%
# NBVAL_CHECK_OUTPUT
kofi = "Once, in the village of Cloverfield, there lived a dormouse named Kofi. Kofi"
bruno = "Once, in the village of Maplewick, there lived a fox named Bruno. Bruno"
locket = (
    " had a lovely green locket that closed with a soft click, and he wore it close to the heart. His best friend was "
    'Åsa the beaver.\n\nOne windy day in March he woke up and the green locket was gone. "I had it yesterday!" he said '
    'with tears in his eyes. "Then it cannot be far," said Åsa the beaver. "We will find it together."\n\n'
)
three_stories = [
    tokenizer.encode(text).ids for text in (f"{kofi} had a fine red scarf.", bruno + locket, kofi + locket)
]
lengths = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 1, 20)]
print("the first block ends with the hero:", [tokenizer.decode(ids[:16])[-18:] for ids in three_stories])

no_chain = patch.object(stage_4, "chained_digest", lambda parent, tokens: chained_digest(0, tokens))
no_parent = patch.object(Content, "matches", lambda content, parent, tokens: content.token_ids == tokens)

right = record(PrefixCachingEngine, three_stories, lengths)
with no_chain:
    checked = record(PrefixCachingEngine, three_stories, lengths)
with no_chain, no_parent:
    wrong = record(PrefixCachingEngine, three_stories, lengths)

for label, told in {"as it is": right, "hash without parent": checked, "and no comparison": wrong}.items():
    hits = [event["cached"] for event in told.events if event["type"] == "admitted"]
    print(f"\n{label}: {hits[2]} of {len(three_stories[2])} tokens from the cache")
    print(f"   … {tokenizer.decode(told.outputs[2])}")

# %% [markdown]
# Kofi has become a fox. Nothing crashed, no number looks odd, the English is fine, and the engine is even *faster*,
# with 96 tokens from the cache. It has just told one user something out of another user's story. With real users that
# is a leak. It is also why this course has a model whose stories you can check by reading them.
#
# With the comparison in place the careless hash does no harm to the text: what it finds wrongly counts as not found. A
# second line of defence is worth its few lines.

# %%
beginnings = [ids[: 3 * BLOCK_SIZE] for ids in three_stories]
prefix_tree(
    beginnings, BLOCK_SIZE, tokenizer.decode, names="123", title="In truth 2 and 3 share nothing (first three blocks)"
)

# %% [markdown]
# ## What still hurts
#
# The batch is static. In the first picture B is over at step 25, and only then may C begin, though A's seat has been
# empty since step 9. And B holds blocks for 24 tokens from the start, of which it needs the last one at the very end.
# Stage 5 decides at every step who takes part.
#
# ## Your turn
#
# ```
# make stage-4-exercise                 # writes exercises/stage_4_prefix_caching.py
# make stage-4-test IMPL=exercises      # tells you how you did
# ```

# %%
# NBVAL_CHECK_OUTPUT
list_exercises(4)

# %% [markdown]
# <details><summary>If you are stuck</summary>
#
# - **the digest**: `int.to_bytes` for the parent, `array("q", tokens).tobytes()` for the tokens, and `+` between them.
# - **the walk**: one thing travels along, the content of the block before: its digest to look up, itself to compare.
# - **taking blocks**: a shared block may lie in the free list. What would happen if you took the empty ones first?
# - **giving back**: a count that reaches zero, and not before. `reversed` is half of the exercise.
#
# </details>
#
# `make stage-4-mutants` shows more plausible mistakes, with what each would look like to a user. Most are invisible
# until the pool is tight.
#
# **To think about.** (a) Two requests with the same prompt of exactly 32 tokens: how many does the second compute, and
# why not none? (b) A puts a space in front of its prompt. How much of the cache does it still find? (c) From the time
# to first token one can tell whether somebody else has sent a text before. How would you keep two customers apart,
# with one more ingredient in the hash? (vLLM calls it `cache_salt`.)
#
# ## Further reading
#
# - Kwon et al., [PagedAttention](https://arxiv.org/abs/2309.06180), 2023, section 4.4: sharing blocks between
#   sequences.
# - Zheng et al., [SGLang: Efficient Execution of Structured Language Model
#   Programs](https://arxiv.org/abs/2312.07104), 2023: RadixAttention, the same with a tree in place of hashes.
# - Merkle, *A Digital Signature Based on a Conventional Encryption Function*, 1987: names that contain names.
# - In vLLM: `vllm/v1/core/kv_cache_utils.py` (`hash_block_tokens`), `vllm/v1/core/block_pool.py`
#   (`get_cached_block`, `_maybe_evict_cached_block`).
#
# **Next:** [5. Continuous batching](5_continuous_batching.ipynb).
