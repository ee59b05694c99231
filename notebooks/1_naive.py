# %% [markdown]
# # 1. Naive generation
#
# The whole of text generation is a loop of three lines: score, choose, append. This notebook is about these three
# lines, because everything that follows in the course must return what they return. You will look into attention once,
# closely; see how a token is drawn; measure how slow the loop is; and find, on the way, the fact that makes stage 2
# possible.
#
# Beside this notebook open `stages/stage_1_naive.py`; it holds the solutions of the exercises, so close it while you
# write your own. It has 71 lines.
#
# **About 20 minutes, and 20 minutes for the exercises.** You need notebook 0.

# %%
import torch

from stages.core import SamplingParams, make_sequences, sample
from stages.model import Attention
from stages.stage_1_naive import NaiveEngine, attend_to_all
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
#
# A wants 8 tokens, B wants 24, C wants 16. They are served in order.

# %%
run = record(NaiveEngine)
swimlane(run.events, names=NAMES, title="Stage 1: who runs when")

# %% [markdown]
# ## What hurts
#
# Every striped box sends a whole text through the model, of which all but the last token has been there before. Here is
# request B alone. Each row is a step, each column a position in the text:

# %%
work_map(run.events, request=1, title="Stage 1, request B: what each step computes")

# %% [markdown]
# The useful work is the dark row and the light diagonal. The rest of the area is striped.
#
# ## Guess first
#
# B has a prompt of 53 tokens and wants 24. So its first step computes 53 tokens, the next 54, and so on. How many
# percent of all the tokens that B sends through the model are striped, that is, computed again?

# %%
my_guess = None  # percent

# %%
# NBVAL_CHECK_OUTPUT
steps = [e["tokens"] for e in run.events if e["type"] == "scheduled" and e["request"] == 1]
computed, needed = sum(steps), steps[-1]
print(f"B's steps compute {steps[0]}, {steps[1]}, … {steps[-1]} tokens: {computed:,} in all; {needed} different ones")
compare(my_guess, 100 * (computed - needed) / computed, "percent")

# %% [markdown]
# ## The idea: score, choose, append
#
# Here is `generate` without its surroundings. `seq.token_ids` is the prompt and everything chosen so far, in one list.

# %%
# NBVAL_CHECK_OUTPUT
source(NaiveEngine.complete)

# %% [markdown]
# `append_token` adds the token and says whether the sequence is over: it has as many tokens as it wanted, or the newest
# is the end-of-sequence token (EOS). All that can be slow is in `next_token_logits`:

# %%
# NBVAL_CHECK_OUTPUT
source(NaiveEngine.next_token_logits)

# %% [markdown]
# The model returns a hidden state for *each* of the `T` tokens, but only the last one has seen the whole text, so only
# that one is turned into logits. This saves more than it seems: a row of logits costs 4,096 × 256 multiplications here,
# and 151,936 × 1,024 in a Qwen3-0.6B.
#
# ## Attention, the only place where tokens meet
#
# Everything in the model treats each token on its own, save for one function. It gets, for each token, a **query**
# (what am I looking for?), a **key** (what do I have to offer?) and a **value** (what do you get if you take it?).

# %%
# NBVAL_CHECK_OUTPUT
source(Attention.forward, attend_to_all)

# %% [markdown]
# `is_causal=True` is the rule that token *i* sees the tokens 0 to *i* and nothing after it. `enable_gqa=True` lets
# several query heads share one key/value head: our model has 4 and 2. Remember that; in stage 2 it halves a bill.
#
# The causal rule has a consequence that is easy to overlook. Let us run B's prompt, and then B's prompt with one more
# token. What happens to the hidden states of the first 53 tokens?

# %%
# NBVAL_CHECK_OUTPUT
engine = NaiveEngine(STORY_MODEL)
prompt = prompts[1]
longer = [*prompt, run.outputs[1][0]]
with torch.inference_mode():
    before = engine.model(torch.tensor(prompt), torch.arange(len(prompt)), attend_to_all)  # [53, H]
    after = engine.model(torch.tensor(longer), torch.arange(len(longer)), attend_to_all)  # [54, H]
difference = (after[: len(prompt)] - before).abs().max()
print(f"hidden states are numbers of size {before.abs().mean():.1f} on average")
print(f"the old ones changed by less than 0.0001: {bool(difference < 1e-4)}")

# %% [markdown]
# Nothing. A token cannot see the future, so the future cannot change it. (They differ in the last bits, because a
# matrix product of another shape adds in another order.) Stage 1 recomputes 53 rows to get 53 times what it had.
#
# ## Choosing a token
#
# With temperature 0 the highest score wins. With a temperature *T* we want to draw a token with the probability
# softmax(logits / *T*). The textbook way is to compute these probabilities and roll a die. This engine does something
# odd instead:

# %%
# NBVAL_CHECK_OUTPUT
source(sample)

# %% [markdown]
# It adds noise of a certain shape to every logit and takes the largest. That is the **Gumbel-max trick**, and it draws
# from exactly the same distribution. It has two practical merits: temperature 0 is the same formula with the noise
# multiplied by zero, and the noise depends on nothing but the request's seed and the index of the token. In stage 5 a
# request may be interrupted, thrown out of memory and computed again in other company; it still gets the same noise.
#
# Do not take it on trust. *Who else had a fine …* what? Draw 4,000 answers with 4,000 seeds:

# %%
C = prompts[2]
question = C + tokenizer.encode(" Who else had a fine").ids
draws = 4000
[sequence] = make_sequences([question], params[2], vocab_size=engine.config.vocab_size, max_model_len=2048)
with torch.inference_mode():
    logits = engine.next_token_logits(sequence)  # [1, V]
hot = [SamplingParams(temperature=1.0, max_tokens=1, seed=seed) for seed in range(draws)]
sequences = make_sequences([question] * draws, hot, vocab_size=engine.config.vocab_size, max_model_len=2048)
counts = torch.bincount(torch.tensor(sample(logits.expand(draws, -1), sequences)), minlength=engine.config.vocab_size)
print("token       softmax   drawn")
for p, token in zip(*logits[0].softmax(-1).topk(6), strict=True):
    print(f"{tokenizer.decode([int(token)])!r:11} {p:7.1%} {counts[token] / draws:7.1%}")

# %% [markdown]
# ## Is it right?
#
# Greedy tokens against `transformers`, for the three requests:

# %%
# NBVAL_CHECK_OUTPUT
for name, ours, theirs in zip(NAMES, run.outputs, hugging_face_greedy(prompts, params), strict=True):
    print(f"{name}: {ours[:6]} …  identical: {ours == theirs}")

# %% [markdown]
# ## How slow is it?
#
# Take texts of 25 to 800 tokens and let each go on for six. The model does not care that they stutter; a token costs
# what it costs. We keep the shortest time from one token to the next. **Guess:** with 800 tokens of text, a token takes
# how many times as long as with 50?

# %%
my_guess = None  # times as long

# %%
lengths = [25, 50, 100, 200, 400, 800]
stutter = prompts[0] * 15
texts = [stutter[:length] for length in lengths]
few = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
timed = record(NaiveEngine, texts, few)
milliseconds = dict(token_times(timed.events))
compare(my_guess, milliseconds[800] / milliseconds[50], "times as long")
time_per_token({"stage 1": timed.events})

# %% [markdown]
# The line rises with the length of the text. It does not start at zero, because every step also has a fixed price: the
# weights are read from memory, and PyTorch launches a few hundred operations. On a model of serious size the fixed
# price is the weights. Keep both in mind, for stage 2 removes the slope, and the rest of the course is about sharing
# the fixed price.
#
# The sum over all tokens is what a user waits for, and what a server pays:

# %%
P = 6  # C's prompt
totals = {
    "stage 1": [n * P + n * (n - 1) / 2 for n in range(1, 501)],
    "each token once": [P + n - 1 for n in range(1, 501)],
}
lines(
    {label: (list(range(1, 501)), ys) for label, ys in totals.items()},
    xlabel="tokens generated",
    ylabel="tokens computed",
    title="What has gone through the model so far",
)

# %% [markdown]
# ## Your turn
#
# ```
# make stage-1-exercise                 # writes exercises/stage_1_naive.py
# make stage-1-test IMPL=exercises      # tells you how you did
# ```

# %%
# NBVAL_CHECK_OUTPUT
list_exercises(1)

# %% [markdown]
# Above they are holes; our solutions are folded below them. Each exercise is tested by itself first, and a failure says
# which mistake it looks like. `make progress` draws how far you are.
#
# **To think about.** (a) Leave out `is_causal=True`: the engine still runs. Would you notice from the text? Try it. (b)
# What would change if every text began at position 1000 instead of 0? Rotary embeddings only see differences of
# positions. Make your guess, then try. (c) Two people ask the same question at the same time, with temperature 0. What
# does stage 1 compute for the second?
#
# ## Further reading
#
# - Vaswani et al., [Attention Is All You Need](https://arxiv.org/abs/1706.03762), 2017.
# - Ainslie et al., [GQA](https://arxiv.org/abs/2305.13245), 2023: why there are fewer key/value heads than query heads.
# - Holtzman et al., [The Curious Case of Neural Text Degeneration](https://arxiv.org/abs/1904.09751), 2020: why one
#   does not always take the most probable token.
# - Maddison, Tarlow, Minka, [A* Sampling](https://arxiv.org/abs/1411.0030), 2014: the Gumbel-max trick, and where it
#   leads.
# - In vLLM: `vllm/v1/sample/sampler.py` chooses the tokens, `vllm/model_executor/models/qwen3.py` is the model. Notice
#   that its layers, too, know nothing of batches: tokens lie end to end there as well.
#
# **Next:** [2. KV cache](2_kv_cache.ipynb), where the stripes go away.
