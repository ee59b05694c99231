"""What tokens add to a text, for every kind of tokenizer, in every script, however the tokens come (CASES D4 to D6)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from nanovllm.outputs import Logprob, TokenLogprob
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.detokenizer import Detokenizer
from nanovllm.text.token_texts import LONGEST_RUN, TokenTexts

LETTERS = "abcdefghijklmnopqrstuvwxyz.,!'"
CORPUS = ["the boat is hello", "naïve café 你好吗 你们好 🙂🙃 привет мир"] * 3
SPECIAL = "<|im_end|>"


def byte_level() -> Tokenizer:
    """As Qwen, Llama 3 and SmolLM2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    return tokenizer


def byte_fallback(strip: bool) -> Tokenizer:
    """As Llama 2, which takes away the first space of a text; and as Gemma, which does not."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS, "▁t", "▁th", "▁the", "你", "🙂"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), tokenizer.normalizer])
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def unigram() -> Tokenizer:
    """As T5."""
    names = ["<unk>", "▁", *LETTERS, *"你好吗🙂é", "▁the", "▁is", "▁hello", "▁boat"]
    tokenizer = Tokenizer(models.Unigram([(name, -len(names) / len(name)) for name in names], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def wordpiece() -> Tokenizer:
    """As BERT."""
    letters = [*LETTERS, *"你好吗🙂é"]
    names = ["[UNK]", *letters, *(f"##{letter}" for letter in letters), "the", "##ing", "boat", "is"]
    tokenizer = Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


KINDS: dict[str, Any] = {
    "byte-level": byte_level,
    "Llama 2": lambda: byte_fallback(strip=True),
    "Gemma": lambda: byte_fallback(strip=False),
    "Unigram": unigram,
    "WordPiece": wordpiece,
}


@cache
def made(kind: str) -> Tokenizer:
    tokenizer = KINDS[kind]()
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return tokenizer


@cache
def texts_of(kind: str) -> TokenTexts:
    return TokenTexts(made(kind))


TEXTS = st.text(max_size=25) | st.lists(
    st.sampled_from([
        *("the boat is hello ", " boat is hello", "🦊", "🙂", "👩‍👩‍👧‍👦", "你好", "كان يا ما كان"),
        *("बात", "e\u0301", "w", " ", "  ", "\n", "''", "!"),
        SPECIAL,
    ]),
    max_size=6,
).map("".join)  # fmt: skip
STEPS = st.lists(st.integers(1, 12), min_size=1, max_size=6)


def go(
    kind: str, ids: Sequence[int], steps: Sequence[int], prompt: Sequence[int] = (), **params: Any
) -> tuple[list[str], list[dict[int, Logprob]], Detokenizer]:
    """What `text` shows after each step and at the end, and the logprobs of all tokens."""
    detokenizer = Detokenizer(texts_of(kind), prompt, SamplingParams(**{"logprobs": 0, "max_tokens": None} | params))
    shown, entries, rest, i = [], [], list(ids), 0
    while rest:
        size = steps[i % len(steps)]
        for token_id in rest[:size]:
            detokenizer.append(token_id)
        entries += [detokenizer.logprobs(token_id, {token_id: (0.0, 1)}) for token_id in rest[:size]]
        rest, i = rest[size:], i + 1
        shown.append(detokenizer.text)
    detokenizer.finish()
    return [*shown, detokenizer.text], entries, detokenizer


def check_text(kind: str, ids: list[int], steps: list[int], skip: bool, stop: tuple[str, ...] = ()) -> str:
    expected = made(kind).decode(ids, skip_special_tokens=skip)
    shown, _, _ = go(kind, ids, steps, skip_special_tokens=skip, stop=stop)
    for before, after in pairwise(shown):
        assert after.startswith(before), "text was taken back"
    assert shown[-1] == expected
    return expected


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@example("🦊🦊w", [6], True, 0)
@example("a🦊🪁🦊🪁", [6], True, 3)
@given(TEXTS, STEPS, st.booleans(), st.integers(0, 6))
def test_the_pieces_join_to_the_decoded_text(kind: str, text: str, steps: list[int], skip: bool, cut: int) -> None:
    """Also where the text ends in the middle of a character, and where a stop string is looked for."""
    ids = made(kind).encode(text).ids
    ids = ids[: max(len(ids) - cut, 0)]
    for stop in (), ("never said",):
        check_text(kind, ids, steps, skip, stop)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(st.data(), STEPS, st.booleans())
def test_any_tokens_join_to_the_decoded_text(kind: str, data: st.DataObject, steps: list[int], skip: bool) -> None:
    size = made(kind).get_vocab_size()
    check_text(kind, data.draw(st.lists(st.integers(0, size + 2), max_size=30)), steps, skip)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@example("🦊w", [1], False)
@example(" boat is hello", [2], True)
@given(TEXTS, STEPS, st.booleans())
def test_texts_bytes_and_offsets_of_tokens_add_up(kind: str, text: str, steps: list[int], skip: bool) -> None:
    ids = made(kind).encode(text).ids
    shown, entries, _ = go(kind, ids, steps, skip_special_tokens=skip)
    joined, raw = "", b""
    for token_id, entry in zip(ids, entries, strict=True):
        found = entry[token_id]
        assert isinstance(found, TokenLogprob) and found.decoded_token is not None
        assert found.text_offset == len(joined)
        if skip and made(kind).id_to_token(token_id) == SPECIAL:
            assert (found.decoded_token.strip(), bytes(found.raw).strip()) == (SPECIAL, SPECIAL.encode())
            continue
        joined, raw = joined + found.decoded_token, raw + bytes(found.raw)
    assert joined == shown[-1] == made(kind).decode(ids, skip_special_tokens=skip)
    assert raw == joined.encode()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(TEXTS, TEXTS)
def test_the_prompt_counts_as_what_stands_before(kind: str, before: str, text: str) -> None:
    """A word's space is written if the prompt has a text, and the output joins to the prompt's text."""
    tokenizer = made(kind)
    prompt, ids = tokenizer.encode(before).ids, tokenizer.encode(text).ids
    if tokenizer.decode([*prompt[-1:], *ids]).startswith(tokenizer.decode(prompt[-1:])) and prompt[-1:] != ids[:1]:
        shown, _, _ = go(kind, ids, [3], prompt)
        if not tokenizer.decode(prompt).endswith("\ufffd"):
            assert tokenizer.decode(prompt) + shown[-1] == tokenizer.decode([*prompt, *ids])


@pytest.mark.parametrize("kind", ["byte-level", "Llama 2", "Gemma"])
def test_the_logprob_of_a_token_that_was_sent_does_not_change(kind: str) -> None:
    """Also where the text ends within a character: a stream has sent the token before anybody knows of the end."""
    special = id_of(kind, SPECIAL)
    for fox in made(kind).encode("a🦊").ids[:-1], made(kind).encode("a🦊").ids[:-2]:
        for ids in fox, [*fox, special], [*fox, special, special]:
            detokenizer = Detokenizer(texts_of(kind), [], SamplingParams(logprobs=0))
            entries, sent = [], []
            for token_id in ids:
                detokenizer.append(token_id)
                entries.append(detokenizer.logprobs(token_id, {token_id: (0.0, 1)})[token_id])
                sent.append(replace(entries[-1]))
            detokenizer.finish()
            assert entries == sent
            told = [entry.decoded_token for entry in sent]
            assert "".join(map(str, told[: len(fox)])) == "a" and set(told[len(fox) :]) <= {SPECIAL}
            assert detokenizer.text == made(kind).decode(ids) == "a" + "\ufffd" * (len(detokenizer.text) - 1)


def id_of(kind: str, token: str) -> int:
    found = made(kind).token_to_id(token)
    assert found is not None
    return found


def entry_of(kind: str, ids: list[int], candidates: list[int]) -> list[TokenLogprob]:
    """What the candidates would add behind `ids`."""
    detokenizer = Detokenizer(texts_of(kind), [], SamplingParams(logprobs=5))
    for token_id in ids:
        detokenizer.logprobs(token_id, {token_id: (0.0, 1)})
    entry = detokenizer.logprobs(candidates[0], dict.fromkeys(candidates, (0.0, 1)))
    return [found for found in entry.values() if isinstance(found, TokenLogprob)]


def test_a_candidate_has_the_text_that_it_would_add_here() -> None:
    fox = [id_of("Llama 2", f"<0x{byte:02X}>") for byte in "🦊".encode()]
    the, w = (id_of("Llama 2", name) for name in ("▁the", "w"))
    begun = entry_of("Llama 2", fox[:3], [fox[3], w, the, fox[0]])
    assert [found.decoded_token for found in begun] == [
        "🦊",
        "\ufffd\ufffd\ufffdw",
        "\ufffd\ufffd\ufffd the",
        "\ufffd\ufffd\ufffd",
    ]
    assert [bytes(found.raw) for found in begun] == [b"\x8a", b"w", b" the", b"\xf0"]
    assert {found.text_offset for found in begun} == {0}
    assert [found.decoded_token for found in entry_of("Llama 2", [], [the, w])] == ["the", "w"]
    assert [found.decoded_token for found in entry_of("Llama 2", [w], [the, w])] == [" the", "w"]
    assert [found.text_offset for found in entry_of("Llama 2", fox, [w])] == [1]


def test_a_long_run_of_byte_tokens_is_not_held_for_ever() -> None:
    """The work for a token stays bounded, and a text in a script that has no tokens of its own is seen to grow."""
    assert LONGEST_RUN < 300
    ids = made("Gemma").encode("ကခဂ" * 200).ids
    shown, _, _ = go("Gemma", ids, [1])
    assert shown[-1] == "ကခဂ" * 200
    assert all(len(text.encode()) > i - LONGEST_RUN - 4 for i, text in enumerate(shown))


def test_a_run_of_byte_tokens_that_is_no_text() -> None:
    """One U+FFFD for each byte, of a space that a text would not begin with as well; however much waited already."""
    space, first, second = (id_of("Llama 2", f"<0x{byte:02X}>") for byte in (0x20, 0x80, 0xF0))
    fox = made("Gemma").encode("🦊").ids
    for ids in ([space, first], [space, *fox, first], [space, *fox], [*fox, second], [*fox, second, *fox, space]):
        for steps in [1], [9]:
            check_text("Llama 2", ids, steps, True)
            check_text("Llama 2", [*ids, id_of("Llama 2", "▁the"), *ids], steps, True, stop=("z", "q🦊🦊"))
    shown, _, detokenizer = go("Llama 2", [id_of("Llama 2", "t"), *fox, second, space], [1], stop=["t\ufffd", "t🦊x"])
    assert (shown[-1], detokenizer.stop_reason) == ("", "t\ufffd"), "what was held is read again"


# Stop strings (D5)


@pytest.mark.parametrize(
    ("stops", "found", "text"),
    [
        ([f"{SPECIAL}h", "o"], f"{SPECIAL}h", "t"),
        ([f"{SPECIAL}ho", "o"], f"{SPECIAL}ho", "t"),
        (["h", f"{SPECIAL}ho"], "h", "t"),
        ([f"{SPECIAL}x", "o"], "o", "th"),
        (["x", "_end"], "_end", "t"),
        (["t<", "end"], "t<", ""),
        (["d|>ho", "o"], "d|>ho", "t"),
        (["th", "d|>h"], "th", ""),
    ],
)
def test_a_token_may_complete_stop_strings_with_and_without_something_hidden(
    stops: list[str], found: str, text: str
) -> None:
    """As ever the first to be complete wins, and of those complete at the same character the one that begins first."""
    tokenizer = Tokenizer(models.WordLevel({"t": 0, "ho": 1}, unk_token="t"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(stop=stops))
    hidden = found if found in SPECIAL or found == "t<" else None
    assert [detokenizer.append(token_id) for token_id in (0, 2, 1)] == [None, hidden, found]
    assert detokenizer.text == text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [SPECIAL, f"t{SPECIAL}", f"{SPECIAL}is", f"t{SPECIAL}i"])
def test_a_hidden_special_token_is_found_by_a_stop_string(kind: str, stop: str) -> None:
    tokenizer = made(kind)
    special = [id_of(kind, SPECIAL)]
    prompt, before, after = (tokenizer.encode(text).ids for text in ("the", "a boat", "is"))
    joined = tokenizer.decode([*prompt, *before, *special, *after], skip_special_tokens=False)
    if stop not in joined:
        return  # this tokenizer writes spaces around it
    shown, _, detokenizer = go(kind, [*before, *special, *after], [1], prompt, stop=["zz", stop])
    whole = tokenizer.decode([*prompt, *before])[len(tokenizer.decode(prompt)) :]
    assert (shown[-1], detokenizer.stop_reason) == (whole.removesuffix("t") if stop[0] == "t" else whole, stop)
    assert all(shown[-1].startswith(text) for text in shown), "a part of the stop string was shown"
    kept, _, _ = go(kind, [*before, *special, *after], [1], prompt, stop=stop, include_stop_str_in_output=True)
    assert kept[-1] == whole + {"s": "is", "i": "i"}.get(stop[-1], "")


PIECES = ["t", "h", "e", " ", "🦊", SPECIAL]


@pytest.mark.parametrize("kind", ["byte-level", "Gemma"])
@settings(max_examples=40)
@example(f"th{SPECIAL}e the", [f"{SPECIAL}e ", "the"], 0)
@example(f"th{SPECIAL}e the", ["<|im"], 0)
@example(f"th{SPECIAL}e the", ["d|>e"], 0)
@example(f"th{SPECIAL}e the", ["h<"], 0)
@example("🦊🦊", ["🦊"], 4)
@given(
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.lists(
        st.lists(st.sampled_from([*PIECES, "<|", "|>", "d|>"]), min_size=1, max_size=3).map("".join),
        min_size=1, max_size=3,
    ),
    st.integers(0, 5),
)  # fmt: skip
def test_stop_strings_in_shown_and_hidden_text(kind: str, text: str, stops: list[str], min_tokens: int) -> None:
    """Against the literal definition: an output ends with the first token behind which its text has a stop string, be
    it the shown text or the text with the special tokens."""
    tokenizer = made(kind)
    ids = tokenizer.encode(text).ids
    detokenizer = Detokenizer(texts_of(kind), [], SamplingParams(stop=stops, min_tokens=min_tokens, max_tokens=None))
    shown: list[str] = []
    ends: list[int] = []
    for number, token_id in enumerate(ids):
        ends += [number] if detokenizer.append(token_id) else []
        shown.append(detokenizer.text)
    detokenizer.finish()
    for before, after in pairwise([*shown, detokenizer.text]):
        assert after.startswith(before), "text was taken back"
    visible = tokenizer.decode(ids)
    assert visible.startswith(detokenizer.text)
    if min_tokens:
        assert not ends or ends[0] >= min_tokens
        return
    expected = len(ids)
    for number in reversed(range(len(ids))):
        so_far = [tokenizer.decode(ids[: number + 1], skip_special_tokens=skip) for skip in (False, True)]
        if any(stop in part for stop in stops for part in so_far):
            expected = number
    assert ends == list(range(expected, len(ids)))
    assert not any(stop in detokenizer.text for stop in stops)
    if not ends:
        assert detokenizer.text == visible


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["byte-level", "Llama 2", "Gemma"])
@settings(max_examples=150, deadline=None)
@given(TEXTS, st.data())
def test_texts_and_stops_are_those_of_transformers(kind: str, text: str, data: st.DataObject) -> None:
    import torch
    from transformers import PreTrainedTokenizerFast
    from transformers.generation.stopping_criteria import StopStringCriteria

    assume("Z" not in text)
    tokenizer = made(kind)
    hf = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    ids = tokenizer.encode(text).ids
    shown, _, _ = go(kind, ids, [1, 5])
    assert shown[-1] == hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    pieces = [*text, SPECIAL, SPECIAL[:4], SPECIAL[4:], "|"]
    stops = data.draw(
        st.lists(st.lists(st.sampled_from(pieces), min_size=1, max_size=3).map("".join), min_size=1, max_size=2)
    )
    criterion = StopStringCriteria(hf, stops)
    before = made(kind).encode("Z").ids  # so that a text does not begin without its space
    detokenizer = Detokenizer(texts_of(kind), before, SamplingParams(stop=stops, max_tokens=None))
    stopped = False
    for end, token_id in enumerate(ids, start=1):
        hits = detokenizer.append(token_id) is not None
        if hits and not stopped and any(stop in tokenizer.decode(ids[:end]) for stop in stops):
            return  # in the shown text, where a hidden token stands between
        stopped = bool(criterion(torch.tensor([[*before, *ids[:end]]]), torch.zeros(1)))
        assert hits == stopped
        if hits:
            return
