"""Text while it comes: nothing lost, doubled, taken back or shown too early (CASES D1, D2)."""

from collections.abc import Iterator, Sequence
from itertools import cycle, pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from nanovllm.sampling_params import SamplingParams
from nanovllm.text.detokenizer import Detokenizer
from nanovllm.text.stop_strings import StopStrings

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "DEF G HI J DEFG",
    "naïve café 你好吗 你们好 🙂🙃 привет мир",
] * 3
UNKNOWN_ID = 100_000  # models have more rows than their tokenizer has tokens


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|start|>"]
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, special_tokens=special, initial_alphabet=alphabet)
    )
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """As sentencepiece writes text: ▁ is a space, but for the first of a text."""
    words = ["▁the", "▁quick", "▁", "fox", "s", "▁你", "好"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="s"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


BYTE_LEVEL = byte_level_tokenizer()
METASPACE = metaspace_tokenizer()
IDS = st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1) | st.just(UNKNOWN_ID), max_size=60)


def stream(tokenizer: Any, ids: Sequence[int], prompt: Sequence[int] = (), **params: Any) -> Iterator[str]:
    """What `text` shows after each token and at the end, as a client that streams would see it."""
    detokenizer = Detokenizer(tokenizer, prompt, SamplingParams(**params))
    for token_id in ids:
        detokenizer.append(token_id)
        yield detokenizer.text
    detokenizer.finish()
    yield detokenizer.text


def check_never_taken_back(texts: Sequence[str]) -> None:
    for before, after in pairwise(texts):
        assert after.startswith(before)


@settings(max_examples=150)
@given(IDS, st.booleans(), st.sampled_from([(), ("zzz", "\ufffd\ufffdq")]))
def test_any_ids_one_at_a_time_give_the_full_decode(ids: list[int], skip: bool, stop: tuple[str, ...]) -> None:
    texts = list(stream(BYTE_LEVEL, ids, skip_special_tokens=skip, stop=stop))
    check_never_taken_back(texts)
    full = BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    if not any(s in full for s in stop):
        assert texts[-1] == full


@settings(max_examples=60)
@given(st.text(max_size=30), st.lists(st.tuples(st.integers(1, 20), st.booleans()), min_size=1, max_size=5))
def test_any_text_in_pieces_of_any_size(text: str, steps: list[tuple[int, bool]]) -> None:
    """Also where nobody looks in between, and where several tokens come at once."""
    ids = BYTE_LEVEL.encode(text).ids
    detokenizer = Detokenizer(BYTE_LEVEL, [], SamplingParams())
    texts = []
    for size, look in cycle(steps):
        for token_id in ids[:size]:
            detokenizer.append(token_id)
        ids = ids[size:]
        if look:
            texts.append(detokenizer.text)
        if not ids:
            break
    detokenizer.finish()
    texts.append(detokenizer.text)
    check_never_taken_back(texts)
    assert texts[-1] == text


def test_a_character_shows_when_its_last_byte_is_there_and_not_before() -> None:
    ids = BYTE_LEVEL.encode("a𝄞b").ids  # not in the corpus: one token for each byte
    assert len(ids) == 6
    assert list(stream(BYTE_LEVEL, ids)) == ["a", "a", "a", "a", "a𝄞", "a𝄞b", "a𝄞b"]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_ended_in_mid_character(cut: int) -> None:
    """By length, or by EOS: what is incomplete is shown as such, once."""
    ids = BYTE_LEVEL.encode("a𝄞").ids[: 1 + cut]
    for end in ([], BYTE_LEVEL.encode("<|end|>").ids):
        texts = list(stream(BYTE_LEVEL, ids + end))
        assert texts[:-1] == ["a"] * (len(ids) + len(end))
        assert texts[-1] == BYTE_LEVEL.decode(ids) == "a\ufffd"


def test_ended_in_mid_character_by_a_stop_string() -> None:
    ids = BYTE_LEVEL.encode("abcSTOP").ids + BYTE_LEVEL.encode("𝄞").ids[:2]
    assert list(stream(BYTE_LEVEL, ids, stop="STOP"))[-1] == "abc"


def test_a_character_that_began_in_the_prompt_does_not_swallow_the_output() -> None:
    prompt, output = BYTE_LEVEL.encode("𝄞").ids[:2], BYTE_LEVEL.encode("𝄞").ids[2:] + BYTE_LEVEL.encode("ok").ids
    assert list(stream(BYTE_LEVEL, output, prompt))[-1] == BYTE_LEVEL.decode(output)


@settings(max_examples=150)
@example([], [2, 0])
@example([], [7, 2, 7, 0])
@given(st.lists(st.integers(0, 7), max_size=7), st.lists(st.integers(0, 7), max_size=20))
def test_spaces_of_a_metaspace_tokenizer(prompt: list[int], output: list[int]) -> None:
    """A word's space is written if something stands before it, be it in the prompt."""
    visible = [i for i in prompt if METASPACE.decode([i])]
    texts = list(stream(METASPACE, output, prompt))
    check_never_taken_back(texts)
    if visible and visible == prompt:
        assert METASPACE.decode(prompt) + texts[-1] == METASPACE.decode(prompt + output)
    if not prompt and output.count(7) < 8:
        assert texts[-1] == METASPACE.decode(output)


@pytest.mark.parametrize("gap", [1, 7, 8, 9, 30])
def test_skipped_tokens_do_not_break_a_character(gap: int) -> None:
    ids = [i for byte in BYTE_LEVEL.encode("a𝄞b").ids for i in [byte, *[0] * gap]]
    assert list(stream(BYTE_LEVEL, ids))[-1] == "a𝄞b"


def test_a_token_that_ends_one_character_and_begins_another_behind_stray_bytes() -> None:
    """ " \xd0" is a token here: its space is out while its byte still waits."""
    stray = BYTE_LEVEL.encode("𝄞").ids[-1:]
    both = [i for i in range(BYTE_LEVEL.get_vocab_size()) if BYTE_LEVEL.decode([i]) == " \ufffd"]
    assert both
    for n in range(14):
        ids = [*stray * n, *both[:1], *stray]
        texts = list(stream(BYTE_LEVEL, ids))
        check_never_taken_back(texts)
        assert texts[-1] == BYTE_LEVEL.decode(ids)


class Meter:
    """A tokenizer that records how many ids it is asked to decode."""

    def __init__(self) -> None:
        self.decoded: list[int] = []

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.decoded.append(len(ids))
        return BYTE_LEVEL.decode(list(ids), skip_special_tokens=skip_special_tokens)


STEADY = {
    "words": BYTE_LEVEL.encode("the quick brown fox").ids,
    "skipped tokens": [0],
    "unknown ids": [UNKNOWN_ID],
    "continuation bytes": BYTE_LEVEL.encode("𝄞").ids[2:3],
    "first bytes": BYTE_LEVEL.encode("𝄞").ids[:1],
    "a first byte, then skipped tokens": [*BYTE_LEVEL.encode("𝄞").ids[:1], *[0] * 50],
}


@pytest.mark.parametrize("ids", STEADY.values(), ids=STEADY.keys())
def test_the_work_for_a_token_does_not_grow(ids: list[int]) -> None:
    meter = Meter()
    ids = (ids * 2000)[:2000]
    texts = list(stream(meter, ids))
    assert texts[-1] == BYTE_LEVEL.decode(ids)
    assert max(meter.decoded) <= 24
    assert sum(meter.decoded) < 40 * len(ids)


def test_nothing_is_decoded_before_somebody_asks() -> None:
    meter = Meter()
    detokenizer = Detokenizer(meter, [], SamplingParams())
    for token_id in BYTE_LEVEL.encode("the quick brown fox").ids:
        detokenizer.append(token_id)
    assert meter.decoded == []
    assert detokenizer.text == "the quick brown fox"


# Stop strings


def pieces(*texts: str) -> tuple[Any, list[int]]:
    """A tokenizer with just these tokens."""

    class Pieces:
        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            return "".join(texts[i] for i in ids)

    return Pieces(), list(range(len(texts)))


def test_a_stop_string_over_several_tokens_never_leaks() -> None:
    tokenizer, ids = pieces("abc ", "DEF", "G", "HI", "J", " more")
    texts = list(stream(tokenizer, ids, stop="DEFGHIJ"))
    assert texts == ["abc "] * 7
    texts = list(stream(tokenizer, ids, stop="DEFGHIJ", include_stop_str_in_output=True))
    assert texts == ["abc "] * 4 + ["abc DEFGHIJ"] * 3


def test_a_false_start_is_released_on_the_miss_or_at_the_end() -> None:
    tokenizer, ids = pieces("abc ", "DEF", "X", "DEF", "G")
    texts = list(stream(tokenizer, ids, stop="DEFGHIJ"))
    assert texts == ["abc ", "abc ", "abc DEFX", "abc DEFX", "abc DEFX", "abc DEFXDEFG"]


def test_a_false_start_that_overlaps_the_true_one() -> None:
    tokenizer, ids = pieces("aab", "aa", "b", "aabc", "x")
    assert list(stream(tokenizer, ids, stop="aabaabc"))[-1] == "aab"


def test_a_stop_string_that_begins_and_ends_inside_tokens() -> None:
    tokenizer, ids = pieces("one ST", "OP two", " three")
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(stop=["STOP"]))
    assert [detokenizer.append(token_id) for token_id in ids] == [None, "STOP", "STOP"]
    assert detokenizer.text == "one "
    assert detokenizer.stop_reason == "STOP"
    assert [detokenizer.append(token_id) for token_id in ids] == ["STOP"] * 3
    detokenizer.finish()
    assert detokenizer.text == "one "
    kept = list(stream(tokenizer, ids, stop=["STOP"], include_stop_str_in_output=True))
    assert kept[-1] == "one STOP"  # and not the rest of the token


@pytest.mark.parametrize("cuts", [(), (3,), (4, 5), tuple(range(1, 12))])
def test_of_several_the_first_to_be_complete_wins_however_the_text_is_cut(cuts: tuple[int, ...]) -> None:
    text = "xx abcd yy z"
    tokenizer, ids = pieces(*(text[a:b] for a, b in pairwise((0, *cuts, len(text)))))
    for stops, shown, reason in (
        (["yy", "bc"], "xx a", "bc"),
        (["z", "yy"], "xx abcd ", "yy"),
        (["abcd", "b"], "xx a", "b"),  # complete first, though it begins later
        (["c", "abc", "bc"], "xx ", "abc"),  # complete together: nothing of any may be shown
        (["nothing", "zz"], text, None),
    ):
        detokenizer = Detokenizer(tokenizer, [], SamplingParams(stop=stops))
        for token_id in ids:
            detokenizer.append(token_id)
        detokenizer.finish()
        assert (detokenizer.text, detokenizer.stop_reason) == (shown, reason)


def test_min_tokens_a_stop_string_counts_only_behind_them() -> None:
    tokenizer, ids = pieces("STOP", "ST", "OP", " ST", "OP")
    for min_tokens, shown in ((0, ""), (1, "STOP"), (2, "STOP"), (3, "STOPSTOP "), (4, "STOPSTOP ")):
        texts = list(stream(tokenizer, ids, stop="STOP", min_tokens=min_tokens))
        assert texts[-1] == shown
    assert list(stream(tokenizer, ids, stop="STOP", min_tokens=5))[-1] == "STOPSTOP STOP"


@settings(max_examples=300)
@example([("aab", False)], ["ab"])
@example([("a", False), ("xb", True), ("a", False)], ["ba", "aa"])
@given(
    st.lists(st.tuples(st.text("ab", max_size=6), st.booleans()), max_size=6),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_search_and_settled_text_against_the_literal_definition(
    pieces: list[tuple[str, bool]], stops: list[str]
) -> None:
    """A string is met where the shown text, or the text with what is hidden, first ends with it."""
    finder, whole, shown, places = StopStrings(stops), "", "", list[int]()  # of each character of the whole
    for text, hidden in pieces:
        expected = None
        for character in text:
            places.append(len(shown))
            whole, shown = whole + character, shown + ("" if hidden else character)
            met = [(places[-len(stop)], stop) for stop in stops if whole.endswith(stop)]
            met += [(len(shown) - len(stop), stop) for stop in stops if not hidden and shown.endswith(stop)]
            if met:
                begin, stop = min(met, key=lambda found: (found[0], -len(found[1])))
                expected = begin, len(shown), stop
                break
        assert finder.feed(text, True, hidden) == expected
        if expected:
            return
        begun = [len(shown)]
        for part in (stop[:n] for stop in stops for n in range(1, len(stop))):
            begun += [places[-len(part)]] if whole.endswith(part) else []
            begun += [len(shown) - len(part)] if shown.endswith(part) else []
        assert finder.settled == min(begun)


@settings(max_examples=150)
@given(IDS, st.lists(st.text("the 你🙂\ufffd", min_size=1, max_size=3), min_size=1, max_size=3))
def test_stop_strings_in_any_ids(ids: list[int], stops: list[str]) -> None:
    texts = list(stream(BYTE_LEVEL, ids, stop=stops, skip_special_tokens=False))
    check_never_taken_back(texts)
    full = BYTE_LEVEL.decode(ids, skip_special_tokens=False)
    ends = [full.index(s) + len(s) for s in stops if s in full]
    if not ends:
        assert texts[-1] == full
        return
    longest = max(len(s) for s in stops if full[: min(ends)].endswith(s))
    assert texts[-1] == full[: min(ends) - longest]
