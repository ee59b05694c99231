"""Text to token ids and back, by Hugging Face's own tokenizer class for the checkpoint."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from nanovllm.text.chat import ChatTemplate, Message, Tool, check_variables
from nanovllm.text.render import Renderer
from nanovllm.text.token_texts import check_decoder
from nanovllm.text.tokenizer_class import read, tokenizer_class


class Tokenizer:
    """What Hugging Face reads from the files beside the weights, special tokens and chat template among them.

    hf:   the tokenizer of `transformers`, for templates and the names of special tokens.
    fast: the `tokenizers.Tokenizer` within, for everything else.
    """

    def __init__(self, path: Path) -> None:
        """`path`: the checkpoint's directory. Raises ValueError if its tokenizer is unreadable, needs custom code, or
        has a decoder whose texts cannot be streamed."""
        if not (path / "tokenizer.json").is_file():
            raise ValueError(
                f"{path} has no tokenizer.json; pass token ids with skip_tokenizer_init=True, or convert it"
            )
        self.path = path
        self.renderer: Renderer | None = None  # of the chat template; set it before the first chat, and close it
        chosen = tokenizer_class(path)
        try:
            self.hf: Any = chosen.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # `tokenizers` raises nothing more specific
            raise ValueError(
                f"{path / 'tokenizer.json'} cannot be read by {chosen.__name__} ({error}); fetch it again, or mend "
                "tokenizer_class in tokenizer_config.json"
            ) from error
        self.fast = self.hf.backend_tokenizer
        try:
            check_decoder(self.fast)
        except ValueError as error:
            raise ValueError(f"{path / 'tokenizer.json'}: {error}") from None
        # Training leaves such settings in some files; a prompt that is cut or padded silently is another prompt.
        self.fast.no_truncation()
        self.fast.no_padding()

    @property
    def eos_token_id(self) -> int | None:
        """The id of the tokenizer's EOS token; None if it has none."""
        eos: int | None = self.hf.eos_token_id
        return eos

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Token ids, with the special tokens that the tokenizer itself puts around a text (a BOS, for some models)."""
        # Other threads run meanwhile; `encode` of `tokenizers` stops them.
        ids: list[int] = self.fast.encode_batch_fast([text], add_special_tokens=special_tokens)[0].ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self.fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    @cached_property
    def chat(self) -> ChatTemplate:
        return ChatTemplate(self.hf, self.renderer)

    def encode_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Tool] | None = None,
        **variables: Any,
    ) -> list[int]:
        """The conversation in the model's own format, with the beginning of its answer unless that is not wanted.

        See `ChatTemplate.render`. Raises ValueError if there is no template, or if the messages are malformed or
        refused by the template.
        """
        return self.encode(self.chat.render(messages, add_generation_prompt, tools, **variables), special_tokens=False)

    def encode_chats(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        add_generation_prompt: bool,
        tools: Sequence[Tool] | None,
        variables: Mapping[str, Any] | None,
        continue_final_message: bool = False,
    ) -> list[list[int]]:
        """The token ids of one conversation, or of each of several, for `LLM.chat`.

        Raises TypeError if an argument has the wrong type, and ValueError for what a template refuses or leaves out.
        """
        if not isinstance(messages, Sequence) or not all(isinstance(m, Mapping | Sequence) for m in messages):
            raise TypeError(f"messages must be a list of dicts, or a list of such lists; got {messages!r}")
        if not isinstance(variables, Mapping | None):
            raise TypeError(f"chat_template_kwargs must be a dict or None; got {variables!r}")
        check_variables(variables := variables or {})
        if continue_final_message:
            if add_generation_prompt:
                raise ValueError("continue_final_message=True needs add_generation_prompt=False")
            variables = {**variables, "continue_final_message": True}
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        encoded = []
        for i, conversation in enumerate(conversations):
            try:
                encoded.append(self.encode_chat(conversation, add_generation_prompt, tools, **variables))
            except ValueError as error:
                if len(conversations) == 1:
                    raise
                raise ValueError(f"conversations[{i}]: {error}") from error
        return encoded


def tokenizer_eos(path: Path) -> int | None:
    """The id of the EOS token that `Tokenizer(path)` would have; None if it has none.

    Hugging Face's class knows it, but takes a second to import. So the usual case is read here: tokenizer_config.json
    names a token that tokenizer.json lists as an added one, and where it lists them as well, both lists are the same.
    Raises ValueError as `Tokenizer` does.
    """
    try:
        stored, config = read(path / "tokenizer.json"), read(path / "tokenizer_config.json")
        added = {token["content"]: token["id"] for token in stored.get("added_tokens", [])}
        if "added_tokens_decoder" in config:
            listed = {token["content"]: int(i) for i, token in config["added_tokens_decoder"].items()}
            plain = listed == added
        else:
            plain = not (path / "special_tokens_map.json").is_file()
        eos = config["eos_token"]
        content = eos["content"] if isinstance(eos, dict) else eos
        if plain and (content is None or content in added):
            return added.get(content)
    except (ValueError, KeyError, TypeError, AttributeError):  # what is wrong with them, the class will say
        pass
    return Tokenizer(path).eos_token_id
