"""The two models to be trained, and the tokenizer in the layout that `AutoTokenizer` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from training.train_data import EOS, EOS_ID, VOCAB_SIZE

MAX_POSITIONS: Final = 2048


def make_model(kind: str, seed: int) -> Qwen3ForCausalLM:
    """A fresh `target` (7.3M parameters) or `draft` (0.9M)."""
    shape: dict[str, dict[str, int]] = {
        "target": {
            "hidden_size": 256,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 768,
        },
        "draft": {
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 384,
        },
    }
    torch.manual_seed(seed)
    config = Qwen3Config(
        **shape[kind],
        vocab_size=VOCAB_SIZE,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        eos_token_id=EOS_ID,
        bos_token_id=None,
        pad_token_id=None,
        use_cache=True,
    )
    return Qwen3ForCausalLM(config)


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json so that `AutoTokenizer` finds them."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )
    fast.save_pretrained(directory)
