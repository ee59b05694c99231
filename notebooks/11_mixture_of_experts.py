# %% [markdown]
# # 11. Mixture of experts: who speaks which word
#
# About two thirds of a large model's weights lie in its MLPs, and there lies most of what it knows. A model that is to
# know more needs more of them. But in a dense model a token must meet *every* weight on its way through the layers:
# twice the knowledge is twice the work for each token, and in decode, where a step takes as long as reading the weights
# does, twice the time.
#
# Does "the" need to meet what the model knows about foxes? A **mixture of experts** has many small MLPs in a layer, and
# a **router** that chooses a few of them for each token. Qwen3-30B-A3B takes the memory of a model of 30 billion
# weights, and a token meets 3 billion of them.
#
# This chapter is an *elective*: it stands on stage 5, and no other chapter stands on it. The model is
# `assets/story_moe`. It has six layers with eight experts each, and a token goes to two of them. It was trained on the
# stories that you know, and it keeps their facts as often as the model of the other chapters.
#
# Beside this notebook open `stages/electives/mixture_of_experts.py`; it holds the solutions of the exercises, so close
# it while you write your own.
#
# **About 25 minutes, and 25 minutes for the exercises.** You need notebook 5.

# %%
import random

import torch

from stages.core import SamplingParams
from stages.electives.mixture_of_experts import (
    MixtureOfExperts,
    MixtureOfExpertsEngine,
    combine,
    route,
    sort_by_expert,
)
from tools.pictures.experts import (
    experts_read,
    favourites,
    hear_routers,
    hear_texts,
    pieces,
    router_picture,
    speakers,
)
from tools.pictures.plots import bars, lines
from tools.pictures.steps import swimlane
from tools.pictures.three_requests import (
    BLOCK_SIZE,
    NAMES,
    NUM_BLOCKS,
    SEATS,
    STORY_MOE,
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
run = record(MixtureOfExpertsEngine, model=STORY_MOE, **SMALL)
swimlane(run.events, names=NAMES, title="Mixture of experts: who runs when")

# %% [markdown]
# The picture of stage 5, and that is the point. Experts are one layer in the place of another. A layer treats each
# token by itself, so scheduler, blocks, prefix cache and attention never notice.
#
# ## What hurt
#
# Where the weights lie, with E experts in a layer of which a token meets K:

# %%
# NBVAL_CHECK_OUTPUT
engine = MixtureOfExpertsEngine(STORY_MOE)
layers = [layer.mlp for layer in engine.model.layers]
total = sum(weight.numel() for weight in engine.model.parameters())
in_experts = sum(weight.numel() for mlp in layers for weight in mlp.experts.parameters())
E, K = len(layers[0].experts), layers[0].num_chosen
print(f"{total:,} weights, of which {in_experts:,} ({in_experts / total:.0%}) in {len(layers)} x {E} experts")
print(f"a token meets {K} of {E} experts in a layer: {total - in_experts + in_experts * K // E:,} weights")

# %% [markdown]
# ## Guess first
#
# A step decodes four sequences, each of which chooses two of eight experts. Eight choices, but some coincide. How many
# experts of a layer must be read, on average over layers and steps?

# %%
my_guess = None  # experts

# %%
tales = [generate_story(random.Random(seed), held_out=True).text for seed in range(40)]
stories = [tokenizer.encode(tale).ids[: 20 + 7 * number] for number, tale in enumerate(tales)]  # each is elsewhere
some = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
sizes, read = [1, 2, 4, 8, 16], []  # sequences in the step, experts read in a layer
for size in sizes:
    engine = MixtureOfExpertsEngine(STORY_MOE, num_blocks=256)
    steps = hear_routers(engine)
    engine.generate(stories[:size], some)
    found = [distinct for tokens, distinct in experts_read(steps, K) if tokens == size]
    read.append(sum(found) / len(found))
compare(my_guess, read[sizes.index(4)], f"of {E} experts")

# %% [markdown]
# If routers chose at random, an expert would be left out by one token with a chance of 6/8, and by four tokens with
# (6/8)⁴. Keep your number in mind: what it means is below.
#
# ## The idea, in pictures
#
# The router is one matrix with a row for each expert. Its product with a token's hidden state is one logit for each
# expert. A softmax makes probabilities of them, which say how well each expert suits the token. The K largest are
# chosen. The answers of their experts are added with these K numbers as weights. In this model the weights are first
# divided by their sum. Other models leave that out. `norm_topk_prob` in config.json says whether a model does it. In
# the code it is `norm`.
#
# Here is what the router of layer 3 says of the beginning of a story. Each column is a token. The chosen
# experts are framed:

# %%
engine = MixtureOfExpertsEngine(STORY_MOE)
start = stories[1][:24]
words = pieces(start, tokenizer.decode)
probabilities = hear_texts(engine, [start])[3].softmax(-1)
router_picture(words, probabilities, K, "Layer 3: what the router thinks of each token")

# %% [markdown]
# Now the experts must be computed. One token after another would read an expert again for each of its tokens. So turn
# the question round: not *which experts has this token?* but *which tokens has this expert?* A token and one of its
# experts make a **pair**. Number the pairs token by token: pair p is choice p % K of token p // K. Now sort them by
# expert. (`route` takes logits. The softmax of the logarithm of probabilities is those probabilities again, so the
# logarithm will do.)

# %%
# NBVAL_CHECK_OUTPUT
weights, experts = route(probabilities[:6].log(), K, norm=True)
order, counts = sort_by_expert(experts, E)
for word, chosen, weight in zip(words, experts.tolist(), weights.tolist(), strict=False):
    print(f"{word!r:>10} goes to experts {chosen}, with weights {weight[0]:.2f} and {weight[1]:.2f}")
print(
    "\npairs by expert:", *(f"{experts.flatten()[pair]}: {words[pair // K]!r}" for pair in order.tolist()), sep="\n  "
)
print("tokens of each expert:", counts)

# %% [markdown]
# The tokens of an expert are neighbours now. Cut the list where the counts say, and each expert runs once, over all of
# its tokens. An expert without tokens does not run, and its weights are not read.
#
# ## The code
#
# Three functions and a loop. The router:

# %%
# NBVAL_CHECK_OUTPUT
source(route)

# %% [markdown]
# The sort, and the way back: each token's answers, times its weights, added up.

# %%
# NBVAL_CHECK_OUTPUT
source(sort_by_expert, combine)

# %% [markdown]
# And the layer:

# %%
# NBVAL_CHECK_OUTPUT
source(MixtureOfExperts.forward)

# %% [markdown]
# ## Is it right?

# %%
# NBVAL_CHECK_OUTPUT
expected = hugging_face_greedy(prompts, params, STORY_MOE)
for name, ours, theirs in zip(NAMES, run.outputs, expected, strict=True):
    print(f"{name}: {len(ours)} tokens, identical to transformers: {ours == theirs}")

# %% [markdown]
# ## Which expert speaks which word
#
# Nobody told the experts what to be good at. They learned together with the router: whoever was a little better at a
# kind of token got more of that kind, and so became better still. Let the model read the beginnings of forty stories
# that it has not seen, and listen to its routers. First one of them, each token with the colour and number of the
# expert that has the larger weight:

# %%
texts = [tokenizer.encode(tale).ids[:150] for tale in tales]
heard = hear_texts(MixtureOfExpertsEngine(STORY_MOE), texts)
LAYER = 1
first = heard[LAYER].argmax(-1).tolist()
words = pieces([token for text in texts for token in text], tokenizer.decode)
speakers(words[: len(texts[0])], first[: len(texts[0])], f"Layer {LAYER}: who speaks which word")

# %% [markdown]
# And in all forty, the words that each expert of this layer has more often than its share. A word may be in several
# lists, and � is a part of a character:

# %%
# NBVAL_CHECK_OUTPUT
for expert, favoured in enumerate(favourites(words, first, E, count=10)):
    print(f"expert {expert}: {'  '.join(word.strip() or repr(word) for word in favoured)}")

# %% [markdown]
# An expert is not a person who knows about foxes. What the experts share out is *kinds of token*: nouns here, names
# and pronouns there, verbs, prepositions, adjectives, the ends of sentences. That was found in large models, too: Jiang
# et al. looked for experts of subjects and found experts of syntax.
#
# ## Are they all used?
#
# Whoever is chosen more learns more, and is chosen still more: left alone, routers send everything to a few experts.
# So training adds a second loss that grows where a router prefers some (`training/experts.py`). An even share is
# 12.5%, and in forty short texts some have more and some less:

# %%
shares = {}
for layer in (LAYER, 5):
    chosen = heard[layer].topk(K).indices.flatten()
    shares[f"layer {layer}"] = (100 * torch.bincount(chosen, minlength=E) / len(chosen)).tolist()
bars(shares, range(E), xlabel="expert", ylabel="share of a layer's pairs [%]", title="How the work is shared")

# %% [markdown]
# ## Is it frugal?
#
# A decode step takes as long as it takes to read the weights. Your guess above was about how many of them that is:

# %%
# NBVAL_CHECK_OUTPUT
for size, distinct in zip(sizes, read, strict=True):
    at_random = E * (1 - (1 - K / E) ** size)
    print(f"{size:2d} sequences: {distinct:.1f} of {E} experts read in a layer; at random {at_random:.1f}")

# %%
MB = 2 / 1e6  # a weight in bf16
per_step = [(total - in_experts + in_experts * distinct / E) * MB for distinct in read]
few = (total - in_experts + in_experts * K / E) * MB
curves = {
    "dense, as many weights": [total * MB] * len(sizes),
    "mixture of experts": per_step,
    "dense, as many as a token meets": [few] * len(sizes),
}
axes = {"xlabel": "sequences in the step", "ylabel": "weights read in a step [MB]"}
lines({name: (sizes, ys) for name, ys in curves.items()}, **axes, title="What is read in a decode step", markers=True)

# %% [markdown]
# The sequences of a step share what is read. So a token's part of it is:

# %%
# NBVAL_CHECK_OUTPUT
for size, mixture in zip(sizes, per_step, strict=True):
    print(f"{size:2d} sequences: {mixture / size:5.2f} MB per token; dense {total * MB / size:5.2f} MB")

# %% [markdown]
# As many experts are read as if the routers chose at random: what one story is about to say tells nothing of another.
# Where texts run in step, as when many ask the same, fewer are.
#
# Alone, a token costs what it costs in the small model, with the weights of the large one to choose from. In company
# that fades: the more tokens share a step, the more experts are read, until all of them are, as in a dense model. What
# stays is arithmetic, since a token is still multiplied by two experts and no more. So a mixture is cheap for *one*
# user, who waits for memory, and for *very many*, who wait for arithmetic, and least so in between.
#
# **Where this gains nothing.** Memory holds all experts, used or not. If the model only just fits, experts do not help.
#
# ## What still hurts
#
# The loop asks for `counts` on the CPU, so on a GPU it waits for the router in every layer, and then launches three
# small products for each expert. Chapter 6 records the launches of a step once, as a CUDA graph, and replays them. No
# graph can hold this loop, because which products there are depends on the tokens. The engine sorts on the GPU and
# computes all experts in two launches, which are the same whatever the router says (`nanovllm/kernels/moe`). On several
# GPUs, the ranks of chapter 7, each has a part of every expert, as it has some of the heads.
#
# ## Your turn
#
# ```
# make elective-moe-exercise                 # writes exercises/electives/mixture_of_experts.py
# make elective-moe-test IMPL=exercises ARGS=-x      # tells you how you did, up to the first failure
# ```

# %%
# NBVAL_CHECK_OUTPUT
list_exercises("moe")

# %% [markdown]
# <details><summary>If you are stuck</summary>
#
# - **the router**: `topk` gives values and indices in one call, and both are wanted. `keepdim=True` keeps a sum a
#   column.
# - **the sort**: you need no loop. `argsort` says which pair comes first, second and so on; `bincount` with
#   `minlength` counts.
# - **the way back**: `order[i]` says where row `i` belongs, so it stands on the left of the assignment.
#
# </details>
#
# `make elective-moe-mutants` shows what goes wrong when one of these is *almost* right.
#
# **To think about.** (a) Swap two experts of a layer, and the two rows of its router: `engine.model.layers[3].mlp` has
# both, as `experts` and `gate.weight`. What changes in the outputs? Make your guess, then try. (b) If each token had
# one expert, and weights that sum to one, what would every weight be? How could such a router learn? (c) Put each
# expert on a GPU of its own. Of a prompt of 1,000 tokens, who waits for whom, and what does the picture of the shares
# say about it?
#
# ## Further reading
#
# - Shazeer et al., [Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts
#   Layer](https://arxiv.org/abs/1701.06538), 2017. The layer much as it is today, and the balance that it needs.
# - Fedus, Zoph & Shazeer, [Switch Transformers](https://arxiv.org/abs/2101.03961), 2021. One expert a token, and the
#   balancing loss that trained this model.
# - Jiang et al., [Mixtral of Experts](https://arxiv.org/abs/2401.04088), 2024. Section 5 asks who speaks which word.
# - Yang et al., [Qwen3 Technical Report](https://arxiv.org/abs/2505.09388), 2025. The architecture of this chapter,
#   with 128 experts of which 8 are chosen.
# - In vLLM: `vllm/model_executor/layers/fused_moe/`: the sort is `moe_align_block_size`, the loop one kernel.
