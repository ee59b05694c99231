"""Which decoders of `tokenizers` can be followed token by token. The others are refused by name."""

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from nanovllm.text.token_texts import TextStream, TokenTexts, check_decoder

SPECIAL = "<|im_end|>"
SPACE = decoders.Replace("▁", " ")
DECODERS: dict[str, tuple[Any, bool]] = {
    "none": (None, True),
    "ByteLevel": (decoders.ByteLevel(), True),
    "ByteLevel, Fuse": (decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]), True),
    "Metaspace": (decoders.Metaspace(), True),
    "Metaspace without the first": (decoders.Metaspace(prepend_scheme="never"), True),
    "WordPiece": (decoders.WordPiece(cleanup=False), True),
    "Fuse": (decoders.Fuse(), True),
    "nested": (decoders.Sequence([decoders.Sequence([SPACE, decoders.ByteFallback()]), decoders.Fuse()]), True),
    "not fused": (decoders.Sequence([SPACE, decoders.ByteFallback()]), True),
    "one space": (
        decoders.Sequence([SPACE, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]), True
    ),
    "two spaces": (
        decoders.Sequence([SPACE, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)]), False
    ),
    "the end": (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), False),
    "ByteLevel, Strip": (decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]), False),
    "Fuse, ByteLevel": (decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()]), False),
    "Replace, ByteLevel": (decoders.Sequence([SPACE, decoders.ByteLevel()]), False),
    "over tokens": (decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "x")]), False),
    "Strip in a run": (decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]), False),
    "BPEDecoder": (decoders.BPEDecoder(), False),
    "CTC": (decoders.CTC(), False),
}  # fmt: skip
ODD = ["a", "b", "▁", "▁▁", "▁a", "##b", "##", "b</w>", "a</w>b</w>", " ", "a ", "|", "<pad>", "Ġ", "Ã", "©", "é"]


@pytest.mark.parametrize(("decoder", "streams"), DECODERS.values(), ids=DECODERS.keys())
def test_a_decoder_streams_or_is_refused_by_name(decoder: Any, streams: bool) -> None:
    """On a vocabulary of what a decoder may stumble over. Some that are refused here do work for most texts."""
    names = [*ODD, *(f"<0x{byte:02X}>" for byte in (0x20, 0x61, 0xC3, 0xA9))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="a"))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<pad>", SPECIAL])
    if not streams:
        with pytest.raises(ValueError, match=r"^the decoder .* is not supported.*skip_tokenizer_init=True$"):
            check_decoder(tokenizer)
        return
    check_decoder(tokenizer)
    draw, texts = random.Random(0), TokenTexts(tokenizer)
    for _ in range(150):
        ids, skip = [draw.randrange(len(names) + 2) for _ in range(draw.randrange(1, 8))], draw.random() < 0.5
        stream = TextStream(texts, [], skip)
        joined = "".join(stream.feed([token_id]) for token_id in ids) + stream.flush()
        assert joined == tokenizer.decode(ids, skip_special_tokens=skip), [tokenizer.id_to_token(i) for i in ids]
