"""The corpus and the tokenizer of the embedded models."""

from __future__ import annotations

import hashlib
import itertools
import random
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from training.grammar import generate_story

EOS: Final = "<|endoftext|>"
EOS_ID: Final = 0
VOCAB_SIZE: Final = 4096
MAX_STORY_TOKENS: Final = 1000
STORIES_PER_CHUNK: Final = 1000
VALIDATION_INDEX: Final = 1 << 40  # stories of the validation set are numbered from here


@dataclass(frozen=True)
class Corpus:
    """Stories laid end to end, each followed by `EOS_ID`; story i is `tokens[offsets[i] : offsets[i + 1]]`."""

    tokens: NDArray[np.uint16]  # [T]
    offsets: NDArray[np.int64]  # [S + 1]
    duplicates: int = 0
    too_long: int = 0

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each story, its end-of-text token included: [S]."""
        return np.diff(self.offsets)


def story_text(seed: int, index: int, held_out: bool = False) -> str:
    """Story `index` of the corpus `seed`."""
    return generate_story(random.Random(seed << 48 | index), held_out).text


def train_tokenizer(seed: int, stories: int) -> Tokenizer:
    """Byte-level BPE over the first stories of the corpus. Every byte is in the alphabet: any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((story_text(seed, index) for index in range(stories)), trainer)
    if tokenizer.token_to_id(EOS) != EOS_ID or tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(
            f"{tokenizer.get_vocab_size()} entries instead of {VOCAB_SIZE}: the grammar has too few words"
        )
    return tokenizer


def build_corpus(tokenizer: Tokenizer, seed: int, num_tokens: int) -> Corpus:
    """Distinct stories, in the order of their numbers, until there are `num_tokens` tokens."""
    stories: list[NDArray[np.uint16]] = []
    seen: set[bytes] = set()
    total = duplicates = too_long = 0
    for first in itertools.count(0, STORIES_PER_CHUNK):
        texts = [story_text(seed, index) for index in range(first, first + STORIES_PER_CHUNK)]
        for text, story in zip(texts, _encode(tokenizer, texts), strict=True):
            digest = hashlib.blake2b(text.encode(), digest_size=12).digest()
            if digest in seen:
                duplicates += 1
            elif len(story) > MAX_STORY_TOKENS + 1:
                too_long += 1
            else:
                seen.add(digest)
                stories.append(story)
                total += len(story)
        if total >= num_tokens:
            break
    return _join(stories, duplicates, too_long)


def build_validation(tokenizer: Tokenizer, seed: int, stories: int) -> Corpus:
    """Stories about held-out combinations of name, species and object."""
    texts = [story_text(seed, VALIDATION_INDEX + index, held_out=True) for index in range(stories)]
    return _join(_encode(tokenizer, texts))


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[NDArray[np.uint16]]:
    """The tokens of each text, EOS included, on all cores."""
    return [np.array([*encoding.ids, EOS_ID], dtype=np.uint16) for encoding in tokenizer.encode_batch(texts)]


def _join(stories: list[NDArray[np.uint16]], duplicates: int = 0, too_long: int = 0) -> Corpus:
    offsets = np.zeros(len(stories) + 1, dtype=np.int64)
    np.cumsum([len(story) for story in stories], out=offsets[1:])
    return Corpus(np.concatenate(stories), offsets, duplicates, too_long)
