# %% [markdown]
# # 2. The KV cache
#
# Stage 1 asks the model about the same words again and again, like somebody who rereads the whole novel before every
# next word. This notebook is about taking notes. The notes are called the **KV cache**; every inference engine has one,
# and nearly all that is interesting about inference engines is about where to keep it.
#
# Beside this notebook open `stages/stage_2_kv_cache.py`; it holds the solutions of the exercises, so close it while you
# write your own. `make stage-2-diff` shows what changed, solutions as well. In this notebook they are folded.
#
# **About 25 minutes, and 40 minutes for the exercises.** You need notebook 1.

# %%
import torch

from stages.core import SamplingParams
from stages.stage_1_naive import NaiveEngine
from stages.stage_2_kv_cache import KVCache, KVCacheEngine
from tools.pictures.blocks import cache_growth
from tools.pictures.plots import lines, time_per_token
from tools.pictures.steps import swimlane, work_map
from tools.pictures.three_requests import (
    NAMES,
    STORY_MODEL,
    compare,
    hugging_face_greedy,
    list_exercises,
    load_tokenizer,
    record,
    source,
    three_requests,
)
from tools.pictures.timeline import token_times

tokenizer = load_tokenizer()
prompts, params = three_requests()

# %% [markdown]
# ## The three requests

# %%
run = record(KVCacheEngine, max_num_seqs=2)
swimlane(run.events, names=NAMES, title="Stage 2: who runs when")

# %% [markdown]
# No stripes. Each prompt goes through the model once (**prefill**), and after that every box is a single token
# (**decode**). And since a step is now so small, two requests share it: a **batch**. Something new is ugly, though: A
# is over after step 8, and its place stays empty until B is over as well. That is a *static* batch. Stage 5 will mend
# it; until then we live with it.
#
# ## What hurt
#
# Request B in stage 1, as you know it from notebook 1:

# %%
naive = record(NaiveEngine)
work_map(naive.events, request=1, title="Stage 1, request B: what each step computes")

# %% [markdown]
# ## Guess first
#
# All the striped area goes away. In stage 1 the three requests sent 2,224 tokens through the model. How many are left?

# %%
my_guess = None  # tokens

# %%
# NBVAL_CHECK_OUTPUT
needed = sum(e["tokens"] for e in run.events if e["type"] == "scheduled")
compare(my_guess, needed, "tokens")
print("same tokens out as stage 1:", run.outputs == naive.outputs)

# %%
work_map(run.events, request=1, title="Stage 2, request B: what each step computes")

# %% [markdown]
# ## The idea: notes that never go out of date
#
# What does the newest token need from the older ones? Only attention looks at other tokens, and what it takes from them
# is a key and a value in every layer. And those can not change any more, as you saw in notebook 1: a token does not see
# what comes after it. Here is the same experiment on the keys and values themselves: B's prompt, and B's prompt with
# one more token, each through a fresh `KVCache`, which is what this stage adds.

# %%
# NBVAL_CHECK_OUTPUT
engine = KVCacheEngine(STORY_MODEL, max_num_seqs=2)
caches = []
for tokens in (prompts[1], [*prompts[1], run.outputs[1][0]]):
    caches.append(KVCache(engine.config, 1, len(tokens), engine.device))
    with torch.inference_mode():
        engine.forward(caches[-1], torch.tensor([tokens]), torch.arange(len(tokens))[None])
old, new = caches
print("keys:", list(new.k.shape), "= [layers, rows, positions, Hkv, D], and as many values")
difference = max((new.k[:, :, :53] - old.k).abs().max(), (new.v[:, :, :53] - old.v).abs().max())
print("those of the first 53 tokens changed by less than 0.001:", bool(difference < 1e-3))

# %% [markdown]
# So: keep them. A step then computes the newest token only, adds its key and value to the notes, and lets its query
# look at all of them. Queries are not kept. Nobody ever asks what an old token was looking for.
#
# ### What do the notes cost?
#
# For each token two vectors (K and V) in each layer for each key/value head. Grouped-query attention halves it here,
# because four query heads share two key/value heads.

# %%
# NBVAL_CHECK_OUTPUT
c = engine.config
models = {  # layers, key/value heads, head size, bytes a number
    "the story model, float32": (c.num_hidden_layers, c.num_key_value_heads, c.head_dim, 4),
    "Qwen3-0.6B, bf16": (28, 8, 128, 2),
    "Llama-3.1-8B, bf16": (32, 8, 128, 2),
    "Llama-2-7B, bf16 (no GQA)": (32, 32, 128, 2),
}
for name, (layers, heads, size, width) in models.items():
    per_token = 2 * layers * heads * size * width
    print(f"{name:26} {per_token / 1024:4.0f} KiB a token, {4096 * per_token / 2**20:6,.0f} MiB for 4,096 tokens")

# %% [markdown]
# The 8-billion-parameter model weighs 16 GB. Thirty-two people with 4,096 tokens each, and the notes weigh as much as
# the model. This is why the rest of the course is about memory.
#
# ## The code
#
# The cache is a rectangle for each layer: a row for each sequence of the batch, a column for each position.

# %%
# NBVAL_CHECK_OUTPUT
source(KVCache)

# %% [markdown]
# Two things deserve a second look.
#
# **One function for prefill and decode.** `Q` is the number of new tokens in each row: as many as the longest prompt,
# or one. First the new keys and values are written at [row, position], then everybody attends. A token must see itself,
# so the order matters.
#
# **The mask.** In stage 1 `is_causal=True` was enough. Now the queries are the *last* few of a longer text, and each
# row is at another place. So the rule is spelled out: a query at position *p* sees the columns 0 to *p* of its own row.

# %%
# NBVAL_CHECK_OUTPUT
source(KVCacheEngine.forward)

# %%
# NBVAL_CHECK_OUTPUT
positions = torch.tensor([[5], [3]])  # decode: two rows with one new token each, the sixth and the fourth of their text
mask = torch.arange(6) <= positions[:, None, :, None]  # [B, 1, Q, context]
for row, visible in enumerate(mask[:, 0, 0].tolist()):
    print(f"row {row}: " + " ".join("sees" if v else " -- " for v in visible))

# %% [markdown]
# The rest is bookkeeping: `prefill` pads the prompts to a rectangle and takes the logits at each row's last *real*
# token; `decode` runs the newest token of every row.

# %%
# NBVAL_CHECK_OUTPUT
source(KVCacheEngine.prefill, KVCacheEngine.decode)

# %% [markdown]
# Is the padding not dangerous? Padded queries compute nonsense, but nobody looks at it. Padded *keys* lie in the cache
# at positions that the row will reach later; the mask hides them until decode has overwritten them with the real ones.
#
# ## Is it right?
#
# Against `transformers`, and each request alone against itself in company. Who sits next to you must not change what
# you are told.

# %%
# NBVAL_CHECK_OUTPUT
for i, theirs in enumerate(hugging_face_greedy(prompts, params)):
    [alone] = engine.generate([prompts[i]], [params[i]])
    print(f"{NAMES[i]}: identical to transformers: {run.outputs[i] == theirs}, alone: {alone == run.outputs[i]}")

# %% [markdown]
# ## Is it fast?
#
# In notebook 1 the time of a token grew with the text. The same texts of 25 to 800 tokens, one after the other.
# **Guess:** with 800 tokens of text, a token now takes how many times as long as with 50?

# %%
my_guess = None  # times as long

# %%
stutter = prompts[0] * 15
texts = [stutter[:length] for length in (25, 50, 100, 200, 400, 800)]
few = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
timed = {
    "stage 1": record(NaiveEngine, texts, few).events,
    "stage 2": record(KVCacheEngine, texts, few, max_num_seqs=1).events,
}
milliseconds = dict(token_times(timed["stage 2"]))
compare(my_guess, milliseconds[800] / milliseconds[50], "times as long")
time_per_token(timed)

# %% [markdown]
# Flat, or nearly. (Not quite, as the query looks at ever more keys; on this model that is small change.) What is left
# is the fixed price of a step: all 7 million weights are read to produce a single token. The *first* token of each text
# is not in the picture. It needs a prefill, and that takes as long as in stage 1.
#
# ### Sharing the fixed price
#
# If reading the weights is what costs, then two tokens in one step should cost little more than one. **Guess:** sixteen
# copies of a request in one batch produce how many times as many tokens a second as one alone?

# %%
my_guess = None  # times as many tokens a second

# %%
engine = KVCacheEngine(STORY_MODEL, max_num_seqs=16)
events: list[dict] = []
engine.trace.on_event = events.append
sizes, rates = [1, 2, 4, 8, 16], []
for size in sizes:
    events.clear()
    engine.generate([prompts[2]] * size, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    [(_, step), *_] = token_times(events)  # milliseconds a decode step takes
    rates.append(size * 1000 / step)
compare(my_guess, rates[-1] / rates[0], "times as many")
curve = {"stage 2": (sizes, rates)}
lines(curve, xlabel="sequences in the batch", ylabel="tokens a second", title="Decode", markers=True)

# %% [markdown]
# On a GPU the line would go straight up to a batch of a hundred and more. Batching is the biggest single lever of
# inference, and so the question of all further stages is: how do we keep the batch full?
#
# ## What still hurts
#
# Let all three run in one batch, and ask the model itself how many tokens it was given, padding included. **Guess:**
# what percentage of them did nobody want?

# %%
my_guess = None  # percent

# %%
# NBVAL_CHECK_OUTPUT
engine = KVCacheEngine(STORY_MODEL, max_num_seqs=3, on_event=(together := []).append)
given: list[int] = []
engine.model.register_forward_pre_hook(lambda _, inputs: given.append(len(inputs[0])))
engine.generate(prompts, params)
wanted = sum(e["tokens"] for e in together if e["type"] == "scheduled")
print(f"prefill: {given[0]} tokens = 3 rows of 54, for prompts of 54, 53 and 6")
print(f"decode:  {len(given) - 1} steps of 3 tokens, though A needs only 7 of them and C only 15")
compare(my_guess, 100 * (sum(given) - wanted) / sum(given), "percent")

# %% [markdown]
# And the memory. The rectangle has 3 rows, each as long as the longest text may become: 53 + 24 = 77 columns. The black
# line is what was set aside, the colours are what it held:

# %%
cache_growth(together, names=NAMES, reserved=3 * 77, title="Stage 2: one batch, one rectangle")

# %% [markdown]
# Here 77 columns are not much. Set `max_tokens` to 1,024, as a chat would, for an answer of "Yes.", and the rectangle
# is almost entirely air. Air, at 128 KiB a token, on the most expensive memory there is. Stage 3 hands it out in small
# pieces instead.
#
# ## Your turn
#
# ```
# make stage-2-exercise                 # writes exercises/stage_2_kv_cache.py
# make stage-2-test IMPL=exercises      # tells you how you did
# ```

# %%
# NBVAL_CHECK_OUTPUT
list_exercises(2)

# %% [markdown]
# <details><summary>If you are stuck</summary>
#
# - **`KVCache.attend`**: two index tensors that broadcast to [B, Q] pick one place for each new token.
# - **the last real token**: not the last column. Rows are padded on the right.
# - **the newest tokens**: the newest of *n* tokens stands at position *n* - 1.
# - **the mask**: the cell with "sees" above is all of it, with one comparison that broadcasts.
#
# </details>
#
# The tests put prompts of different lengths into one batch, on purpose: half of the classic mistakes are invisible as
# long as there is one row, or all are equally long. Where texts differ, a failing test names the first wrong token and
# the kind of mistake that it looks like. `make stage-2-mutants` shows ten of these mistakes and what each does to the
# text.
#
# **To think about.** (a) In `decode`, shift all positions by one. A does not change at all, and B writes "the wind had
# never empty". Why so little? Which column does nobody write to? (b) Prefill of a long prompt is as fast with a KV
# cache as without it. So for which workload is stage 2 not better than stage 1? (c) A and B share their first 50
# tokens. How many columns of the rectangle hold the same numbers twice?
#
# ## Further reading
#
# - Shazeer, [Fast Transformer Decoding: One Write-Head is All You Need](https://arxiv.org/abs/1911.02150), 2019: why
#   decoding is bound by memory, and what fewer key/value heads do about it.
# - Pope et al., [Efficiently Scaling Transformer Inference](https://arxiv.org/abs/2211.05102), 2022: prefill, decode
#   and batch size, with all the arithmetic.
# - PyTorch's [gpt-fast](https://github.com/meta-pytorch/gpt-fast): how far a contiguous cache and plain PyTorch go.
# - In `transformers`: `cache_utils.py`, where `DynamicCache` grows by concatenation and `StaticCache` is a rectangle.
# - In vLLM there is no rectangle. What took its place is in `vllm/v1/core/kv_cache_manager.py`, and in the next stage.
#
# **Next:** [3. Paged blocks](3_paged_blocks.ipynb).
