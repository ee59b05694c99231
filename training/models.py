"""The embedded models: made, saved with their tokenizer, loaded again as everybody will load them, and judged."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from training.corpus import EOS, EOS_ID, VOCAB_SIZE, Corpus
from training.experts import BALANCE, compute_all_experts, counts_of_experts
from training.grammar import check_story, opening
from training.loop import IGNORED, Batches

MAX_POSITIONS: Final = 2048
STORY_SEED: Final = 2_000_003  # story i of the evaluation begins with opening(Random(STORY_SEED + i))
STORIES_AT_ONCE: Final = 200
TEMPERATURE: Final = 0.8
BATCH_TOKENS: Final = 16384
# The model knows nothing but stories: a message is a beginning, and the answer goes on in the next paragraph.
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ message['content'] | trim }}"
    "{% if not loop.last or add_generation_prompt %}{{ '\\n\\n' }}{% endif %}{% endfor %}"
)

_SHAPES: Final[dict[str, dict[str, Any]]] = {
    "target": {  # 7.3M parameters
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 768,
    },
    "draft": {  # 0.9M parameters
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 384,
    },
    "moe": {  # 5.2M parameters, of which a token uses 2.6M
        "hidden_size": 192,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,  # of layers without experts, of which there are none
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "router_aux_loss_coef": BALANCE,
    },
}


def make_model(kind: str, seed: int) -> PreTrainedModel:
    """A fresh "target" or "draft" (Qwen3), or "moe" (Qwen3-MoE)."""
    torch.manual_seed(seed)
    config_class, model_class = (
        (Qwen3MoeConfig, Qwen3MoeForCausalLM) if kind == "moe" else (Qwen3Config, Qwen3ForCausalLM)
    )
    config = config_class(
        **_SHAPES[kind],
        vocab_size=VOCAB_SIZE,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        eos_token_id=EOS_ID,
        bos_token_id=None,
        pad_token_id=None,
        use_cache=True,
    )
    model = model_class(config)
    model.generation_config = GenerationConfig(do_sample=True, temperature=TEMPERATURE, eos_token_id=EOS_ID)
    return model


def save(model: PreTrainedModel, directory: Path) -> None:
    """Write a bf16 copy of `model`. Each file is replaced as a whole: a run that is cut leaves no half ones."""
    copy: Any = type(model)(model.config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        copy.save_pretrained(scratch)
        for path in Path(scratch).iterdir():
            path.chmod(0o644)
            path.replace(directory / path.name)


def save_tokenizer(tokenizer: Tokenizer, directory: Path, chat_template: str | None) -> None:
    """Write tokenizer.json and tokenizer_config.json so that `AutoTokenizer` finds them."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
        chat_template=chat_template,
    )
    fast.save_pretrained(directory, save_jinja_files=False)


def load(directory: Path, device: torch.device) -> Any:
    """The bf16 checkpoint, computed with in fp32."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).eval()


@torch.no_grad()
def compare(target: Any, draft: Any, validation: Corpus, device: torch.device) -> dict[str, float]:
    """Validation losses (nats per token), and how well the draft foresees the target.

    `agreement`: share of positions with the same argmax. `acceptance`: mean of sum(min(p, q)), which is the chance that
    speculative sampling at temperature 1 accepts a draft token (Leviathan et al., 2023).
    """
    sums = torch.zeros(5, dtype=torch.float64, device=device)  # target loss, draft loss, same argmax, min(p, q), tokens
    batches = Batches(validation, BATCH_TOKENS, 0, device)
    for width, stories in batches.epoch(0):
        inputs, labels = batches.load(width, stories)
        real = labels != IGNORED  # [B, width]
        wanted = labels[real]  # [R]
        p: Tensor = target(input_ids=inputs, use_cache=False).logits[real].log_softmax(-1)  # [R, V]
        q: Tensor = draft(input_ids=inputs, use_cache=False).logits[real].log_softmax(-1)  # [R, V]
        rows = torch.arange(len(wanted), device=device)
        sums[0] -= p[rows, wanted].double().sum()
        sums[1] -= q[rows, wanted].double().sum()
        sums[2] += (p.argmax(-1) == q.argmax(-1)).sum()
        sums[3] += torch.minimum(p, q).exp().double().sum()
        sums[4] += len(wanted)
    means = (sums[:4] / sums[4]).tolist()
    names = ("target_loss", "draft_loss", "agreement", "acceptance")
    return {name: round(mean, 4) for name, mean in zip(names, means, strict=True)}


@torch.no_grad()
def judge_experts(model: Any, validation: Corpus, device: torch.device) -> dict[str, Any]:
    """Validation loss of a mixture of experts (nats per token), and each expert's share of a layer's work."""
    compute_all_experts(model)
    loss, counts = torch.zeros((), dtype=torch.float64, device=device), torch.zeros((), device=device)
    batches = Batches(validation, BATCH_TOKENS, 0, device)
    for width, stories in batches.epoch(0):
        inputs, labels = batches.load(width, stories)
        logits: Tensor = model(input_ids=inputs, use_cache=False).logits  # [B, width, V]
        loss += F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        counts = counts + counts_of_experts(model, labels != IGNORED)  # [layers, E]
    shares = (counts / counts.sum(-1, keepdim=True)).tolist()
    tokens = len(validation.tokens) - len(validation.lengths)  # a story's first token is only an input
    return {
        "validation_loss": round(float(loss) / tokens, 4),
        "expert_shares": [[round(share, 3) for share in layer] for layer in shares],
    }


@torch.no_grad()
def tell_stories(
    target: Any, directory: Path, count: int, max_new_tokens: int, device: torch.device
) -> list[dict[str, Any]]:
    """Stories from held-out openings at temperature 0.8 without filters, each with the checker's verdict."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    openings = [opening(random.Random(STORY_SEED + index)) for index in range(count)]
    told: list[dict[str, Any]] = []
    torch.manual_seed(0)
    for first in range(0, count, STORIES_AT_ONCE):
        some = openings[first : first + STORIES_AT_ONCE]
        prompts = [tokenizer(start.text).input_ids for start in some]
        longest = max(map(len, prompts))
        ids = torch.tensor([[EOS_ID] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)  # [B, L]
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        output = target.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_new_tokens,
            eos_token_id=EOS_ID,
            pad_token_id=EOS_ID,
        )
        for start, row in zip(some, output[:, longest:].tolist(), strict=True):
            ended = EOS_ID in row
            new = row[: row.index(EOS_ID)] if ended else row
            text = start.text + tokenizer.decode(new)
            problems = check_story(text, start.facts) + ([] if ended else ["no end-of-text token"])
            told.append({"text": text, "opening": start.text, "tokens": len(new), "problems": problems})
    return told
