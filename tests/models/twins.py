"""Small checkpoints of many kinds, made from a description, for comparison with what Hugging Face reads in them.

    path = make_tokenizer(directory, Kind(model="unigram", specials="added_tokens_decoder"))

A `Kind` says how the tokenizer works and in which files its facts stand. The models of these checkpoints come from
`tests/weights.py`; here only config.json names a model type, because the choice of a tokenizer class depends on it.
"""

import json
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from nanovllm.text.tokenizer_class import tokenizer_class

Model = Literal["byte-level BPE", "byte fallback", "unigram", "WordPiece"]
Place = Literal[
    "tokenizer.json",
    "added_tokens_decoder",
    "special_tokens_map",
    "additional_special_tokens",
    "extra_special_tokens",
    "added_tokens.json",
    "both",
]

RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])
CORPUS = [
    "Nell the fox had a red kite, and she would not let go of it.",
    "hello world, the boat is red; don't stop at 1234 kites!",
    "user assistant system the end of the story, said the hare",
    "Zoë und Björn fliegen über den Fluss — ein schöner Tag",
]
TEXTS = [
    "hello boat",
    " the fox  is red",
    "<|turn|>user\nhello<|end|>\n",
    "<s>Nell</s> the kite<|turn|>",
    "Zoë 🦊 1234 don't",
    "",
]
PARTS = [{"type": "text", "text": " hello "}, {"type": "text", "text": "Zoë, the fox"}]
USER, ASSISTANT = {"role": "user", "content": " hello the fox "}, {"role": "assistant", "content": "the kite "}
SYSTEM = {"role": "system", "content": "the end\n"}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [USER, ASSISTANT],
    [SYSTEM, USER, ASSISTANT, USER],
    [{"role": "user", "content": PARTS}],
    [SYSTEM, {"role": "user", "content": PARTS}, ASSISTANT, USER],
    [USER, USER],
]
TURN = "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
ASK = "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
# As the families write theirs, with the special tokens of the checkpoints here.
QWEN = r"""
{%- if messages[0]['role'] == 'system' %}
    {{- '<|turn|>system\n' + messages[0].content + '<|end|>\n' }}
{%- else %}
    {{- '<|turn|>system\nthe fox, an assistant<|end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|turn|>' + m.role + '\n' + m.content + '<|end|>' + '\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|turn|>' + m.role + '\n' + m.content.strip('\n') + '<|end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|turn|>assistant\n' }}
{%- endif %}"""
LLAMA_3 = r"""{{- bos_token }}
{%- for m in messages %}
    {{- '<|turn|>' + m['role'] + '<|turn|>\n\n' }}
    {%- if m['content'] is string %}
        {{- m['content'] | trim }}
    {%- else %}
        {%- for c in m['content'] %}{%- if c.type == 'text' %}{{- c.text | trim }}{%- endif %}{%- endfor %}
    {%- endif %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|turn|>assistant<|turn|>\n\n' }}
{%- endif %}
"""
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    r"{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}{% else %}"
    "{% set loop_messages = messages %}{% set system = '' %}{% endif %}{% for m in loop_messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate!') }}{% endif %}"
    "{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + m['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system!') }}{% endif %}"
    "{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    r"{{ '<|turn|>' + role + '\n' + m['content'] | trim + '<|end|>\n' }}{% endfor %}"
    r"{% if add_generation_prompt %}{{ '<|turn|>model\n' }}{% endif %}"
)
ZEPHYR = r"""{% for m in messages %}
{% if m['role'] == 'user' %}
{{ '<|user|>\n' + m['content'] + eos_token }}
{% else %}
{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
WALKS = (
    r"{% for m in messages %}{{ '<|turn|>' ~ m.role }}{% for c in m.content %}{{ c['text'] + '\n' }}{% endfor %}"
    "<|end|>{% endfor %}" + ASK
)
TEMPLATES = {
    "ChatML": TURN + ASK,
    "ChatML for training": TURN.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}") + ASK,
    "Qwen": QWEN,
    "Llama 3": LLAMA_3,
    "Llama 2": LLAMA_2,
    "Gemma": GEMMA,
    "Zephyr": ZEPHYR,
    "walks": WALKS,
}
TAKES_PARTS = {"Llama 3", "walks"}
TAKES_STRINGS = TEMPLATES.keys() - {"walks"}
TEMPLATE = TEMPLATES["ChatML"]
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
TURNS = ["<|turn|>", "<|end|>"]

SHAPE = {"vocab_size": 600, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "eos_token_id": 3}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1}
OF_QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
EXPERTS = {"mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2}, "qwen2_moe": OF_QWEN, "qwen3_moe": OF_QWEN}


@dataclass(frozen=True)
class Kind:
    """What a tokenizer is, and where its facts stand.

    specials:   the file that makes special tokens of <|turn|> and <|end|>; "both" is two files that agree.
    eos:        a special token, or "fox", which may be an entry of the vocabulary like any other; "" leaves it out.
    bos:        where a BOS comes from: the post-processor of tokenizer.json, the chat template, both or nowhere.
    template:   a name in `TEMPLATES`; None is no template.
    place:      where the template stands; a list of named ones has others beside the one that is used.
    flags:      more keys of tokenizer_config.json; None is no such file.
    """

    model: Model = "byte-level BPE"
    family: str = "llama"
    declared: str | None = "PreTrainedTokenizerFast"
    specials: Place = "tokenizer.json"
    eos: str | None = "</s>"
    eos_is_dict: bool = False
    bos: Literal["", "post-processor", "template", "both"] = ""
    template: str | None = "ChatML"
    place: Literal["tokenizer_config.json", "list of names", "chat_template.jinja", "both", "directory"] = (
        "tokenizer_config.json"
    )
    flags: tuple[tuple[str, Any], ...] | None = ()


def make_checkpoint(path: Path, kind: Kind, model: Path) -> Path:
    """A tokenizer of this kind beside the weights of `model`, whose vocabulary has more rows than the tokenizer."""
    shutil.copytree(model, path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    make_tokenizer(path, kind)
    write(path / "config.json", config)
    return path


def make_tokenizer(path: Path, kind: Kind) -> Path:
    """Write tokenizer.json and its neighbours, and a config.json, to the directory `path`."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_str(trained(kind.model))
    tokenizer.add_special_tokens(list(NAMED.values()))
    if kind.specials in ("tokenizer.json", "both"):
        tokenizer.add_special_tokens(TURNS)
    if kind.bos in ("post-processor", "both"):
        bos = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", bos)])
    tokenizer.save(str(path / "tokenizer.json"))
    eos: Any = kind.eos
    if kind.eos_is_dict and kind.eos is not None:
        eos = {"__type": "AddedToken", "content": eos, "lstrip": False, "rstrip": False, "normalized": False}
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": eos, **dict(kind.flags or ())}
    if eos == "":
        del config["eos_token"]
    if kind.declared is not None:
        config["tokenizer_class"] = kind.declared
    first = len(Tokenizer.from_str(trained(kind.model)).get_vocab(with_added_tokens=False))
    first += sum(token not in tokenizer.get_vocab(with_added_tokens=False) for token in NAMED.values())
    if kind.specials in ("added_tokens_decoder", "both"):
        words = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
        config["added_tokens_decoder"] = {str(first + i): {"content": t, **words} for i, t in enumerate(TURNS)}
    if kind.specials in ("additional_special_tokens", "extra_special_tokens"):
        config[kind.specials] = TURNS
    if kind.specials == "added_tokens.json":
        write(path / kind.specials, {token: first + i for i, token in enumerate(TURNS)})
    if kind.specials == "special_tokens_map":
        said = {"eos_token": "<|end|>", "pad_token": {"content": "<|turn|>", "lstrip": False, "rstrip": True}}
        write(path / "special_tokens_map.json", said)
    if kind.template is not None:
        begin = "{{ bos_token }}" if kind.bos in ("template", "both") else ""
        write_template(path, kind, config, begin + TEMPLATES[kind.template])
    if kind.flags is not None:
        write(path / "tokenizer_config.json", config)
    raw: dict[str, Any] = SHAPE | EXPERTS.get(kind.family, {})
    if kind.family in ("gemma3", "mistral3"):
        raw = {"text_config": raw, "eos_token_id": 3}
    write(path / "config.json", raw | {"model_type": kind.family})
    return path


def write_template(path: Path, kind: Kind, config: dict[str, Any], template: str) -> None:
    """Puts the template where Hugging Face finds it, and others where it does not, or under another name."""
    other = "{{ raise_exception('not this one') }}"
    if kind.place == "list of names":
        named = {"default": template, "tool_use": other}
        config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    elif kind.place == "tokenizer_config.json":
        config["chat_template"] = template
        (path / "chat_template.json").write_text(json.dumps({"chat_template": other}))  # read for images only
    else:
        (path / "chat_template.jinja").write_text(template, encoding="utf-8")
        if kind.place == "both":
            config["chat_template"] = other
        if kind.place == "directory":
            (path / "additional_chat_templates").mkdir()
            (path / "additional_chat_templates" / "tool_use.jinja").write_text(other)


@cache
def trained(model: Model) -> str:
    """tokenizer.json of a tokenizer that has seen `CORPUS`, without special tokens of its own but <unk>."""
    if model == "byte-level BPE":
        tokenizer = Tokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(r"'s|'t| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    elif model == "byte fallback":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        strip = decoders.Strip(" ", 1, 0)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
        )
        special = ["<unk>", *(f"<0x{i:02X}>" for i in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=450, special_tokens=special, show_progress=False)
    elif model == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    stored = json.loads(tokenizer.to_str())
    if model == "byte fallback":  # bytes are pieces of the vocabulary; a text that spells one is no byte
        stored["added_tokens"] = [token for token in stored["added_tokens"] if token["content"] == "<unk>"]
    return json.dumps(stored)


def auto_tokenizer(path: Path) -> Any:
    """The twin of a tokenizer: what `AutoTokenizer` makes of the same files.

    Ours has the class that transformers has chosen since 5.22, whichever version is installed. Where an older one
    chooses another class (for Llama 3 and Qwen2, of some checkpoints), there is no twin, and the test is skipped.
    """
    theirs = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    if RELEASE < (5, 22) and type(theirs) is not tokenizer_class(path):
        pytest.skip(f"transformers {transformers.__version__} chooses {type(theirs).__name__} for such files")
    return theirs


def write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
