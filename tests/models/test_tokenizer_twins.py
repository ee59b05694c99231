"""A twin for every tokenizer: what `AutoTokenizer` makes of the same files (CASES K1, K5)."""

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.models.checkpoint import read_json
from nanovllm.text.detokenizer import Detokenizer
from nanovllm.text.token_texts import TokenTexts
from nanovllm.text.tokenizer import Tokenizer, tokenizer_eos
from stages.checkpoint import read_eos_token_ids
from stages.checkpoint import tokenizer_eos as stage_eos
from tests.models.twins import (
    CHATS,
    NAMED,
    TAKES_PARTS,
    TAKES_STRINGS,
    TEMPLATES,
    TEXTS,
    TURNS,
    Kind,
    Model,
    Place,
    auto_tokenizer,
    make_tokenizer,
    write,
)

MODELS: tuple[Model, ...] = ("byte-level BPE", "byte fallback", "unigram", "WordPiece")
PLACES: tuple[Place, ...] = (
    "tokenizer.json",
    "added_tokens_decoder",
    "special_tokens_map",
    "additional_special_tokens",
    "extra_special_tokens",
    "added_tokens.json",
    "both",
)
CLASSES = (
    None, "PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer", "LlamaTokenizerFast", "Qwen2TokenizerFast",
    "GPT2Tokenizer", "NoSuchTokenizer",
)  # fmt: skip
FLAGS = ("add_prefix_space", "add_bos_token", "add_eos_token", "split_special_tokens", "clean_up_tokenization_spaces")


def compare(path: Path, template: str | None = "ChatML") -> None:
    """Ours and Hugging Face's read the same; or neither can."""
    try:
        theirs = auto_tokenizer(path)
    except Exception:
        with pytest.raises(ValueError, match=str(path)):
            Tokenizer(path)
        return
    ours = Tokenizer(path)
    assert type(ours.hf) is type(theirs)
    assert ours.eos_token_id == tokenizer_eos(path) == stage_eos(path) == theirs.eos_token_id
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"], text
    compare_chats(ours, theirs, template)
    compare_texts(ours, theirs)


def compare_chats(ours: Tokenizer, theirs: Any, template: str | None) -> None:
    """The same prompt for each conversation, with and without the beginning of an answer; or both refuse it."""
    for chat, ask in product(CHATS, (True, False)):
        try:
            expected = theirs.apply_chat_template(as_wanted(chat, template), add_generation_prompt=ask)["input_ids"]
        except Exception:
            with pytest.raises(ValueError, match="template"):
                ours.encode_chat(chat, ask)
        else:
            assert ours.encode_chat(chat, ask) == expected, chat


def as_wanted(chat: list[dict[str, Any]], template: str | None) -> list[dict[str, Any]]:
    """The conversation in the form that the template can read: Hugging Face leaves that to the caller."""

    def content(said: Any) -> Any:
        if isinstance(said, str):
            return said if template in TAKES_STRINGS else [{"type": "text", "text": said}]
        return said if template in TAKES_PARTS else "\n".join(part["text"] for part in said)

    return [message | {"content": content(message["content"])} for message in chat]


def compare_texts(ours: Tokenizer, theirs: Any) -> None:
    """What any tokens are as text, streamed or not, also those that do not exist; and where a stop string ends it."""
    draw, texts = random.Random(0), TokenTexts(ours)
    rows = len(theirs) + 50  # models have more rows than their tokenizer has tokens
    sequences = [[draw.randrange(rows) for _ in range(12)] for _ in range(6)]
    sequences += [[*theirs(text)["input_ids"], draw.randrange(rows), *theirs(text)["input_ids"]] for text in TEXTS]
    num_stops = 0
    for ids, skip in product(sequences, (True, False)):

        def decode(ids: list[int], skip: bool = skip) -> str:
            text: str = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            return text

        whole = decode(ids)
        assert ours.decode(ids, skip) == whole
        assert shown(texts, ids, skip_special_tokens=skip) == (whole, len(ids), None)
        stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
        if not stop.strip() or "\ufffd" in stop:
            continue
        end = next(n for n in range(1, len(ids) + 1) if stop in decode(ids[:n]))
        text = decode(ids[:end])
        if text == whole[: len(text)]:  # else it is not settled yet what the end will be
            found = shown(texts, ids, skip_special_tokens=skip, stop=[stop])
            if found[1] < end or text.index(stop) > len(found[0]):  # with something hidden in it
                assert skip and stop in decode(ids[: found[1]], False) and text.startswith(found[0])
            else:
                assert found == (text[: text.index(stop)], end, stop)
            num_stops += 1
    assert num_stops > 5


def shown(texts: TokenTexts, ids: list[int], **params: Any) -> tuple[str, int, str | None]:
    """The text that a user sees of these tokens, one by one, after how many of them it ends, and by which stop."""
    detokenizer = Detokenizer(texts, [], SamplingParams(max_tokens=None, **params))
    for count, token in enumerate(ids, start=1):
        if detokenizer.append(token) is not None:
            return detokenizer.text, count, detokenizer.stop_reason
    detokenizer.finish()
    return detokenizer.text, len(ids), None


# Each model with each place, and with what else may go wrong; one by one, so that a failure names its cause.
KINDS = [Kind(model=model, specials=place) for model, place in product(MODELS, PLACES)] + [
    Kind(specials="added_tokens_decoder", bos="both", place="chat_template.jinja"),
    Kind(model="byte fallback", bos="post-processor", declared="LlamaTokenizer"),
    Kind(model="byte fallback", bos="both", declared="LlamaTokenizerFast", flags=(("legacy", True),)),
    Kind(model="byte fallback", declared="LlamaTokenizer", flags=(("add_prefix_space", False),)),
    Kind(declared="LlamaTokenizerFast", bos="template"),  # Llama 3
    Kind(declared="Qwen2Tokenizer", family="qwen3"),
    Kind(declared="Qwen2Tokenizer", family="qwen3", flags=(("add_prefix_space", True),)),
    Kind(declared="PreTrainedTokenizerFast", family="qwen2"),
    Kind(declared="LlamaTokenizerFast", family="qwen2"),  # as distilled models have it
    Kind(declared=None, family="qwen3", eos=None),
    Kind(declared=None, family="qwen2_moe"),
    Kind(declared=None, family="qwen3_moe"),
    Kind(declared="GPT2Tokenizer", flags=(("add_prefix_space", True),)),  # SmolLM2
    Kind(declared="GPT2Tokenizer", flags=(("add_bos_token", True),)),
    Kind(model="unigram", flags=(("add_bos_token", True), ("add_eos_token", True))),
    Kind(eos="fox"),
    Kind(eos=""),
    Kind(model="byte fallback", declared="LlamaTokenizer", eos=""),  # the class has one
    Kind(model="WordPiece", eos="fox", eos_is_dict=True),
    Kind(eos_is_dict=True, flags=(("split_special_tokens", True),)),
    Kind(flags=None, place="directory"),  # no tokenizer_config.json
    # As families have it.
    Kind(declared="Qwen2Tokenizer", family="qwen3", template="Qwen", eos="<|end|>", specials="both"),
    Kind(template="Llama 3", bos="post-processor", eos="<|end|>", place="chat_template.jinja"),
    Kind(model="byte fallback", bos="post-processor", declared="LlamaTokenizer", template="Llama 2"),
    Kind(model="byte fallback", declared="GemmaTokenizer", template="Gemma", flags=(("add_bos_token", True),)),
    Kind(model="byte fallback", declared=None, family="gemma3_text", template="Gemma", bos="post-processor"),
    Kind(model="byte fallback", declared=None, family="gemma3", bos="post-processor"),
    Kind(model="byte fallback", declared="LlamaTokenizer", family="mistral", template="Llama 2"),
    Kind(declared="LlamaTokenizerFast", family="mistral3"),
    Kind(model="byte fallback", declared=None, family="mistral"),
    Kind(model="byte fallback", declared="LlamaTokenizer", family="ministral"),
    Kind(model="byte fallback", declared=None, family="ministral"),
    Kind(model="byte fallback", declared="LlamaTokenizerFast", family="mixtral", bos="post-processor"),
    Kind(model="unigram", template="walks", place="both", specials="extra_special_tokens"),
    Kind(template="Zephyr", place="list of names"),
    Kind(template="ChatML for training", place="directory"),
    Kind(template=None),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.model}-{kind.family}-{kind.declared}-{kind.specials}")
def test_the_same_ids_texts_and_eos(kind: Kind, tmp_path: Path) -> None:
    """K1"""
    compare(make_tokenizer(tmp_path / "model", kind), kind.template)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.builds(
        Kind,
        model=st.sampled_from(MODELS),
        family=st.sampled_from(["llama", "qwen2", "qwen3"]),
        declared=st.sampled_from(CLASSES),
        specials=st.sampled_from(PLACES),
        eos=st.sampled_from(["</s>", "<|end|>", "fox", "never seen", "", None]),
        eos_is_dict=st.booleans(),
        bos=st.sampled_from(["", "post-processor", "template", "both"]),
        template=st.sampled_from([*TEMPLATES, None]),
        place=st.sampled_from(["tokenizer_config.json", "list of names", "chat_template.jinja", "both", "directory"]),
        flags=st.dictionaries(st.sampled_from(FLAGS), st.booleans()).map(lambda d: tuple(sorted(d.items()))),
    ),
    auto_map=st.sampled_from([None, {"AutoTokenizer": [None, "own.Own"]}, ["own.Own", None]]),
)
def test_any_combination(kind: Kind, auto_map: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = make_tokenizer(tmp_path_factory.mktemp("kind") / "model", kind)
    if auto_map is not None:
        write(path / "tokenizer_config.json", read_json(path / "tokenizer_config.json") | {"auto_map": auto_map})
    compare(path, kind.template)


MARKED = tuple(place for place in PLACES if place != "special_tokens_map")  # which puts them in other roles


def test_special_tokens_are_one_token_each_wherever_they_stand(tmp_path: Path) -> None:
    """K1, without asking Hugging Face: one id for <|turn|>, and the same prompt from every place."""
    prompts = []
    for place in MARKED:
        tokenizer = Tokenizer(make_tokenizer(tmp_path / place, Kind(specials=place)))
        assert [len(tokenizer.encode(token)) for token in (*TURNS, *NAMED.values())] == [1, 1, 1, 1]
        prompts.append(tokenizer.encode_chat(CHATS[2]))
    assert prompts.count(prompts[0]) == len(MARKED)


@pytest.mark.slow
def test_special_tokens_of_a_real_model_may_stand_in_the_other_file(smollm2: Path, tmp_path: Path) -> None:
    """K1 as it was reported: a chat has 37 tokens, not 66, and the answer ends."""
    for file in smollm2.iterdir():
        (tmp_path / file.name).symlink_to(file)
    stored, config = (read_json(smollm2 / name) for name in ("tokenizer.json", "tokenizer_config.json"))
    moved = [token for token in stored["added_tokens"] if token["content"] in ("<|im_start|>", "<|im_end|>")]
    stored["added_tokens"] = [token for token in stored["added_tokens"] if token not in moved]
    config["added_tokens_decoder"] = {str(token.pop("id")): token for token in moved}
    for name, content in (("tokenizer.json", stored), ("tokenizer_config.json", config)):
        (tmp_path / name).unlink()
        write(tmp_path / name, content)
    chat = [{"role": "user", "content": "What is the capital of Norway?"}]
    theirs = auto_tokenizer(tmp_path).apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    with LLM(tmp_path, max_model_len=128, kv_cache_gib=0.05) as llm:
        [output] = llm.chat(chat, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
        assert llm.tokenizer is not None
        text = llm.tokenizer.chat.render(chat)
    assert output.prompt_token_ids == theirs and len(theirs) == 37 and theirs[:2] == [1, 9690]
    assert len(RawTokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text)) == 66
    assert output.outputs[0].text == "The capital of Norway is Oslo." and output.outputs[0].finish_reason == "stop"


def test_a_decoder_that_cannot_stream_is_refused_at_load(tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path / "model", Kind())
    stored = read_json(path / "tokenizer.json")
    stored["decoder"] = {"type": "Sequence", "decoders": [stored["decoder"], {"type": "CTC", "pad_token": "<pad>",
        "word_delimiter_token": "|", "cleanup": True}]}  # fmt: skip
    write(path / "tokenizer.json", stored)
    with pytest.raises(ValueError, match=r"tokenizer\.json: the decoder ByteLevel, CTC is not supported.*token ids"):
        Tokenizer(path)


@pytest.mark.parametrize("eos", ["fox", "</s>", None])
def test_stages_have_the_same_eos(eos: str | None, tmp_path: Path) -> None:
    """K1, K2: also an EOS token that is an ordinary entry of the vocabulary."""
    path = make_tokenizer(tmp_path / "model", Kind(model="WordPiece", eos=eos))
    write(path / "generation_config.json", {"eos_token_id": [7, 8]})
    assert read_eos_token_ids(path) == {7, 8, Tokenizer(path).eos_token_id} - {None}


@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json"])
def test_code_of_a_checkpoint_is_never_run_and_never_asked_about(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K5: what is known without that code is read; a tokenizer that is nothing without it is refused by name."""

    def ask(*question: Any) -> str:
        raise AssertionError(f"a question on the terminal: {question}")

    monkeypatch.setattr("builtins.input", ask)
    path = make_tokenizer(tmp_path / "model", Kind(declared="OwnTokenizer", eos="fox"))
    auto_map = {"AutoTokenizer": ["own.Own", None], "AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    (path / "own.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')\nclass Own: pass\n")
    plain = Tokenizer(path).encode(TEXTS[0])
    write(path / where, read_json(path / where) | {"auto_map": auto_map})
    if where == "config.json":
        assert Tokenizer(path).encode(TEXTS[0]) == plain
        read_eos_token_ids(path)
    else:
        with pytest.raises(ValueError, match=r"own\.Own.*auto_map.*never run.*skip_tokenizer_init"):
            Tokenizer(path)
        with pytest.raises(ValueError, match="code"):
            read_eos_token_ids(path)
    assert not (tmp_path / "run").exists()


def test_a_class_that_reads_no_tokenizer_json_is_refused(tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path / "model", Kind(declared="AutoConfig"))
    with pytest.raises(ValueError, match="tokenizer_class='AutoConfig'"):
        Tokenizer(path)


@pytest.mark.parametrize("declared", ["LlamaTokenizer", {"a": "b"}, 7, ["x"], True])
def test_files_without_sense_are_refused_and_never_a_crash(declared: Any, tmp_path: Path) -> None:
    """With `skip_tokenizer_init` a refusal is a warning, and any other error would be the end."""
    path = make_tokenizer(tmp_path / "model", Kind())
    write(path / "tokenizer_config.json", read_json(path / "tokenizer_config.json") | {"tokenizer_class": declared})
    (path / "tokenizer.json").write_bytes(b"\xff\xfe\x00")
    what = r"tokenizer\.json cannot be read by" if isinstance(declared, str) else "tokenizer_class must be the name"
    with pytest.raises(ValueError, match=what):
        Tokenizer(path)
