"""Text to token ids and back, by the tokenizer that lies beside the weights."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from nanovllm.text.chat import ChatTemplate, Message


class Tokenizer:
    """tokenizer.json through `tokenizers`, which loads in milliseconds; `transformers` only where a chat needs it."""

    def __init__(self, path: Path) -> None:
        """`path`: the checkpoint's directory. Raises ValueError if it has no tokenizer.json to be read."""
        if not (path / "tokenizer.json").is_file():
            raise ValueError(
                f"{path} has no tokenizer.json; pass token ids with skip_tokenizer_init=True, or convert it"
            )
        self.path = path
        try:
            self.fast = FastTokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # `tokenizers` raises nothing more specific
            raise ValueError(f"{path / 'tokenizer.json'} cannot be read ({error}); fetch it again") from error
        # Training leaves its own in some files; a prompt cut or padded without a word is another prompt.
        self.fast.no_truncation()
        self.fast.no_padding()

    def encode(self, text: str) -> list[int]:
        """With the special tokens that the tokenizer itself puts around a text (a BOS, for some models)."""
        ids: list[int] = self.fast.encode_batch_fast([text])[0].ids  # other threads run meanwhile; `encode` stops them
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self.fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    @cached_property
    def chat(self) -> ChatTemplate:
        from transformers import AutoTokenizer  # seconds to import, and only chat templates need it

        return ChatTemplate(AutoTokenizer.from_pretrained(self.path))

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The conversation in the model's own format, ready for its answer.

        Raises ValueError without a template, and for messages that are none or that the template refuses.
        """
        text = self.chat.render(messages)
        ids: list[int] = self.fast.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids
