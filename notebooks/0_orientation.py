# %% [markdown]
# # 0. Orientation: what happens when a model generates
#
# You type a sentence, and a machine types back. Between the two there is a **language model**, which you can train in
# PyTorch, and an **inference engine**, which you probably have never seen from the inside. The model is a function:
# text in, scores for the next word out. The engine is everything else: it calls that function again and again, for many
# people at once, without computing anything twice and without running out of memory.
#
# In these notebooks you build such an engine, in stages. Every stage is one Python file with one new idea, under 300
# lines. You need PyTorch and a laptop. There is nothing to download: a model of 7 million parameters, trained to tell
# stories about small animals and their belongings, lies in `assets/`.
#
# This notebook takes about twenty minutes. It shows a model generating, by hand; the three requests that you will meet
# again in every notebook; the picture that you will learn to read; and how to work with this repository.
#
# The notebooks are stored with their outputs, and so with the answers to every question. If you like to be surprised,
# clear them first (*Edit, Clear Outputs of All Cells*). The mark `# NBVAL_CHECK_OUTPUT` at the head of a cell is for
# the project's tests; ignore it.

# %%
import torch

from stages.checkpoint import load_model
from stages.core import SamplingParams
from stages.manifest import load_stages
from stages.stage_1_naive import NaiveEngine, attend_to_all
from stages.stage_5_continuous_batching import ContinuousBatchingEngine
from tools.pictures.steps import swimlane
from tools.pictures.three_requests import (
    NAMES,
    STORY_MODEL,
    THREE,
    compare,
    hugging_face_greedy,
    load_tokenizer,
    record,
    three_requests,
)

# %% [markdown]
# ## Tokens: a model does not read letters
#
# Text is cut into **tokens**, pieces that were frequent when the tokenizer was made, and each piece has a number. Our
# tokenizer knows 4,096 pieces; those of large models know 150,000. From here on, text is a list of integers.

# %%
# NBVAL_CHECK_OUTPUT
tokenizer = load_tokenizer()
ids = tokenizer.encode("Lotte the sparrow held up a lovely yellow").ids
for token in ids:
    print(f"{token:5d}  {tokenizer.decode([token])!r}")

# %% [markdown]
# Most words are a token of their own, with the space in front of them. That is all there is to know about tokenizers
# for this course: the engines take token ids and give token ids back.
#
# ## Logits: a score for everything that could come next
#
# Now the model. It is a stack of eight layers, and *our* model has one peculiarity: it takes a list of `T` tokens laid
# end to end, and a function `attend`, which decides which token may look at which. You will write several such
# functions. Stage 1 has the plainest: every token looks at itself and at all tokens before it.

# %%
# NBVAL_CHECK_OUTPUT
loaded = load_model(STORY_MODEL)
model, config = loaded.model, loaded.config
print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} million parameters in {config.num_hidden_layers} layers")

with torch.inference_mode():
    hidden = model(torch.tensor(ids), torch.arange(len(ids)), attend_to_all)
    logits = model.logits(hidden[-1:])
print("tokens in:        ", list(torch.tensor(ids).shape))
print("hidden states out:", list(hidden.shape))
print("logits:           ", list(logits.shape))

# %% [markdown]
# The logits are 4,096 scores, one for every token that could come next. A softmax turns them into probabilities. Before
# you look at the next cell: *Lotte the sparrow held up a lovely yellow …* what? Say three candidates aloud.

# %%
probabilities = logits[0].softmax(-1)
for p, token in zip(*probabilities.topk(6), strict=True):
    print(f"{p:6.1%}  {tokenizer.decode([int(token)])!r}")

# %% [markdown]
# That is a model with an opinion about what sparrows own. Now **choose** one token, **append** it, and ask again. Here
# are eight turns by hand, always with the most probable token ("greedy", or temperature 0):

# %%
# NBVAL_CHECK_OUTPUT
text = list(ids)
with torch.inference_mode():
    for _ in range(8):
        hidden = model(torch.tensor(text), torch.arange(len(text)), attend_to_all)
        text.append(int(model.logits(hidden[-1:]).argmax()))
        print(f"{len(text) - 1:2d} tokens through the model -> {tokenizer.decode(text)}")

# %% [markdown]
# You have just seen an inference engine. It is short, correct and slow, for a reason that stands in the left column:
# for the last word it sent 16 tokens through the model, and *Lotte* for the eighth time. And it serves one person at a
# time. The rest of the course is about these two sentences.
#
# ## The three requests
#
# Every notebook opens with the same three requests, so that only the engine changes. A and B begin alike and then go
# different ways, as chats do that share their instructions. C is short. They want different numbers of tokens.

# %%
# NBVAL_CHECK_OUTPUT
prompts, params = three_requests()
for request, prompt, p in zip(THREE, prompts, params, strict=True):
    print(f"{request.name}: {len(prompt)} tokens in, {p.max_tokens} wanted: …{request.text[-58:]!r}")
common = next(i for i, (a, b) in enumerate(zip(prompts[0], prompts[1], strict=False)) if a != b)
print(f"A and B share their first {common} tokens")

# %% [markdown]
# An engine has one method, `generate`: lists of token ids in, lists of token ids out. Here is the one from stage 5, the
# best that you will have built by the end of notebook 5.

# %%
# NBVAL_CHECK_OUTPUT
goal = record(ContinuousBatchingEngine, max_num_seqs=2)
for name, prompt, output in zip(NAMES, prompts, goal.outputs, strict=True):
    print(f"{name}: …{tokenizer.decode(prompt)[-20:]!r} ->{tokenizer.decode(output)!r}")

# %% [markdown]
# ## The picture
#
# While it works, an engine tells anyone who listens what it is doing, as plain dictionaries: `added`, `admitted`,
# `scheduled`, `token`, `finished`, and more in later stages. Everything that you will see drawn comes from these events
# alone. Here are the first ones of the run above (without their time stamps):

# %%
# NBVAL_CHECK_OUTPUT
for event in goal.events[:12]:
    print({key: value for key, value in event.items() if key != "t"})

# %% [markdown]
# The engine runs the model in **steps**, and in each step decides which tokens of which request to send through it.
# Step 1 takes all 54 tokens of A and all 53 of B. C has to wait, as we allowed only two at a time (`max_num_seqs=2`).
# (A and B begin alike, but they enter in the same step, so neither can find what the other computes: notebook 4 shows
# when that changes. What `blocks` tells is the subject of notebook 3.)
# As a picture:

# %%
swimlane(goal.events, names=NAMES, title="Stage 5, the goal")

# %% [markdown]
# How to read it: one row a request, one column a step. A dark box is **prefill**: the prompt goes through the model for
# the first time, and the number says how many tokens that is. A light box is **decode**: one token goes in, the next
# one comes out. The black bar is the end of a request. C moves in as soon as A has moved out.
#
# And here are the same requests in the engine that you ran by hand, which is stage 1:

# %%
start = record(NaiveEngine)
swimlane(start.events, names=NAMES, title="Stage 1, where we begin")

# %% [markdown]
# One after the other, and striped boxes everywhere: tokens that had been through the model before and go through it
# again. Counting steps even flatters it, for a striped box is not one token but a whole text.
#
# **Your turn to guess**, before you run the next two cells. Together the three requests want 48 tokens. Stage 1
# and stage 5 return the very same ones. How many times as many tokens does stage 1 send through the model? Write a
# number; `None` is allowed, but then there is nothing to be surprised about.

# %%
my_guess = None

# %%
# NBVAL_CHECK_OUTPUT
work = [sum(e["tokens"] for e in run.events if e["type"] == "scheduled") for run in (start, goal)]
print(f"tokens through the model: stage 1 {work[0]:,}, stage 5 {work[1]:,}")
print("same tokens out:", start.outputs == goal.outputs)
compare(my_guess, work[0] / work[1], "times as many")

# %% [markdown]
# And these texts have at most 77 tokens. Let A go on for 1,000 tokens, and the factor is above 500: 54 + 55 + … + 1053
# against 1,053. Something that grows with the square of the length is rarely what you want.
#
# Draw each step as wide as its work, both engines on the same scale, and the goal is a sliver:

# %%
swimlane(start.events, names=NAMES, by="tokens", until=work[0], title="Stage 1, by tokens computed")

# %%
swimlane(goal.events, names=NAMES, by="tokens", until=work[0], title="Stage 5, by tokens computed, same scale")

# %% [markdown]
# ## How do we know that it is right?
#
# Fast and wrong is easy. An engine that mixes up two requests still writes fluent English, only about somebody else's
# button. So there is one judge for all stages: Hugging Face's `transformers`. With temperature 0 and in float32, every
# engine here must return *exactly* its tokens. Not similar ones.

# %%
# NBVAL_CHECK_OUTPUT
expected = hugging_face_greedy(prompts, params)
for name, ours, theirs in zip(NAMES, goal.outputs, expected, strict=True):
    print(f"{name}: {len(ours)} tokens, identical to transformers: {ours == theirs}")

# %% [markdown]
# With a temperature above 0 the engine draws from the probabilities instead of taking the largest, and a `seed` makes
# the draw repeatable. The same story, told three times:

# %%
for seed in range(3):
    sampling = SamplingParams(temperature=1.0, max_tokens=24, seed=seed)
    [output] = NaiveEngine(STORY_MODEL).generate([prompts[2]], sampling)
    print(f"seed {seed}: {THREE[2].text}{tokenizer.decode(output)} …")

# %% [markdown]
# ## The ladder
#
# Each stage removes what hurt most in the one before, and leaves something that hurts:

# %%
# NBVAL_CHECK_OUTPUT
for stage in load_stages()[:5]:
    print(f"{stage.number}  {stage.title}\n   idea:    {stage.idea}\n   removes: {stage.removes}")
    print(f"   costs:   {stage.costs}\n")

# %% [markdown]
# ## How to work with this repository
#
# For every stage N there is a notebook and a file `stages/stage_N_*.py`. Read them side by side; the notebook shows the
# pieces of the file that matter and never has code of its own that the engine needs. Then write the engine yourself. In
# a terminal, in the repository's directory:
#
# | command | what it does |
# |---|---|
# | `make stage-1-notebook` | opens notebook 1 |
# | `make stage-1-exercise` | writes `exercises/stage_1_naive.py`: the stage with holes in it |
# | `make stage-1-test IMPL=exercises` | tests *your* file; an open hole fails with its hint |
# | `make stage-1-test` | tests the solution, to see what passing looks like |
# | `make stage-2-diff` | what stage 2 changed against stage 1 |
# | `make stage-1-demo` | tells a story in the terminal |
# | `make help` | everything else |
#
# A hole is 3 to 15 lines long, comes with a hint, and raises `NotImplementedError` until you fill it. Everything around
# it works. The solution is in `stages/`; looking is not cheating, it is how everybody learned this. But try for ten
# minutes first.
#
# **Warming up**, in this notebook:
#
# 1. Change the text in the tokenizer's cell to a word that the stories never use, say `"Kubernetes"`. How many tokens
#    is it now?
# 2. Give the model an opening of your own in the cell with the turns by hand, and let it run for 500 turns (print every
#    fiftieth). You can feel it slow down.
# 3. Give the stage 5 engine `max_num_seqs=3`. What happens to the row of C, and how many steps does the picture have?
#
# ## Further reading
#
# - Vaswani et al., [Attention Is All You Need](https://arxiv.org/abs/1706.03762), 2017: the model.
# - Kwon et al., [Efficient Memory Management for Large Language Model Serving with
#   PagedAttention](https://arxiv.org/abs/2309.06180), 2023: the paper behind vLLM, and behind stage 3. Its introduction
#   is the best five pages on why engines are interesting.
# - vLLM is the engine of the field. Its `LLM.generate` (`vllm/entrypoints/llm.py`) has the interface that ours has, and
#   its loop (`vllm/v1/engine/core.py`, `EngineCore.step`) has three lines that you will recognise after notebook 5:
#   schedule, execute, update.
