"""Ask the table of cards for a card that is not here."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nanovllm.kernels import cards
from nanovllm.kernels.attention.paged_decode import decode_config
from nanovllm.kernels.attention.paged_prefill import prefill_config
from nanovllm.kernels.fp8 import fp8_linear
from nanovllm.kernels.linear import choice
from nanovllm.kernels.moe.grouped_mlp import choose_tile

KNOWN: list[Any] = [cards.rows_of, decode_config, prefill_config, choice._look_up, choose_tile, fp8_linear.choose_tile]


@contextmanager
def as_card(card: tuple[int, int], user_file: Path = Path("there is none")) -> Iterator[None]:
    """Every device is a card of this compute capability, as far as the table is concerned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cards, "capability", lambda device: card)
        patch.setattr(cards, "user_file", lambda card: user_file)
        for function in KNOWN:
            function.cache_clear()
        try:
            yield
        finally:
            for function in KNOWN:
                function.cache_clear()
