"""What Hugging Face's `generate` answers, kept on disk for as long as it would answer the same.

The answers lie beside the cached model and not in the repository, so that every machine asks Hugging Face itself once.
They are made again when transformers, torch, a file of the model, or the questions are others.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from filelock import FileLock

from tests import oracle

FILE = "hf_answers.json"
NO_TOKEN = -1  # an EOS id that no token has


@dataclass(frozen=True)
class Chat:
    """A conversation: what the user says in each turn, and how every turn is to be answered, greedily.

    The names of the options are those of `SamplingParams`.
    """

    users: tuple[str, ...]
    system: str | None = None
    parts: bool = False  # whether the contents are lists of parts
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def messages(self, answers: Sequence[str]) -> list[dict[str, Any]]:
        """The conversation after the model's answers so far, up to what the user says next."""
        said = [] if self.system is None else [("system", self.system)]
        for user, answer in zip(self.users, [*answers, None], strict=False):
            said.append(("user", user))
            if answer is not None:
                said.append(("assistant", answer))

        def content(text: str) -> Any:
            return [{"type": "text", "text": text}] if self.parts else text

        return [{"role": role, "content": content(text)} for role, text in said]


@dataclass(frozen=True)
class Answer:
    """One turn. `text` ends before a stop string or a stop token; the ids end with what stopped them."""

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    stop_reason: str | int | None = None


def hf_answers(path: Path, chats: Sequence[Chat]) -> list[list[Answer]]:
    """The answers to each turn of each chat, from the cache or from Hugging Face."""
    kept = cached(path.parent / FILE, key(path, chats), lambda: [ask(path, chat) for chat in chats])
    return [[Answer(**answer) for answer in answers] for answers in kept]


def key(path: Path, chats: Sequence[Chat]) -> dict[str, Any]:
    """Everything that the answers depend on."""
    return {
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "torch": torch.__version__,
        "model": {file.name: digest(file) for file in sorted(path.iterdir()) if file.is_file()},
        "how": digest(Path(__file__)),
        "chats": [asdict(chat) for chat in chats],
    }


def cached(file: Path, key: Any, make: Callable[[], Any]) -> Any:
    """What `file` holds under this key; made, and kept in place of what was there, if it holds something else."""
    key = json.loads(json.dumps(key))
    with FileLock(file.with_suffix(".lock")):  # another process of the same test run may be making them
        try:
            kept = json.loads(file.read_text(encoding="utf-8"))
            if kept["key"] == key:
                return kept["answers"]
        except (OSError, ValueError, KeyError, TypeError):  # none yet, or damaged
            pass
        answers = make()
        file.write_text(json.dumps({"key": key, "answers": answers}), encoding="utf-8")
        return answers


def digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def ask(path: Path, chat: Chat) -> list[dict[str, Any]]:
    """The conversation with Hugging Face's model, turn by turn, each with the text that a user would have seen."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = oracle.truth(path).model
    eos: list[int] = model.generation_config.eos_token_id
    ends = [*([NO_TOKEN] if chat.ignore_eos else eos), *chat.stop_token_ids]
    answers: list[Answer] = []
    for _ in chat.users:
        # Whatever the caller's form is, SmolLM2's template takes strings.
        messages = Chat(chat.users, chat.system).messages([answer.text for answer in answers])
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        stops = {"stop_strings": list(chat.stop), "tokenizer": tokenizer} if chat.stop else {}
        output = model.generate(
            **prompt, do_sample=False, max_new_tokens=chat.max_tokens, eos_token_id=ends, **stops
        )  # [1, T]
        prompt_ids = prompt["input_ids"][0].tolist()
        ids = output[0, len(prompt_ids) :].tolist()
        answers.append(told(tokenizer, chat, prompt_ids, ids, set(() if chat.ignore_eos else eos)))
    return [asdict(answer) for answer in answers]


def told(tokenizer: Any, chat: Chat, prompt_ids: list[int], ids: list[int], eos: set[int]) -> Answer:
    """What the user is told of Hugging Face's ids: it keeps what stopped it in the text, and says no reason."""

    def text(ids: list[int], hidden: bool = True) -> str:
        words: str = tokenizer.decode(ids, skip_special_tokens=hidden, clean_up_tokenization_spaces=False)
        return words

    if ids[-1] in eos:
        return Answer(prompt_ids, ids, text(ids), "stop")
    if ids[-1] in chat.stop_token_ids:
        return Answer(prompt_ids, ids, text(ids[:-1]), "stop", ids[-1])
    whole = text(ids, hidden=False)
    met = [stop for stop in chat.stop if stop in whole]
    if met:
        assert met == [met[0]], f"{chat} meets several stop strings"
        return Answer(prompt_ids, ids, whole[: whole.index(met[0])], "stop", met[0])
    assert len(ids) == chat.max_tokens
    return Answer(prompt_ids, ids, text(ids), "length")
