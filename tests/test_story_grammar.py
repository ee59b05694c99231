"""The story grammar: deterministic, varied, clean text, and a checker that passes its stories and catches exchanges."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from training.corpus import EOS_ID, build_corpus, story_text, train_tokenizer
from training.facts import ADJECTIVES, NAMES, NOUNS, PLACES, SPECIES
from training.grammar import PLOTS, Facts, Story, check_story, generate_story, is_held_out, opening
from training.template import compile_template
from training.train import render_readme

ASSETS = Path(__file__).resolve().parent.parent / "assets"
COUNT = 2000


@pytest.fixture(scope="module")
def stories() -> list[Story]:
    return [generate_story(random.Random(seed)) for seed in range(COUNT)]


def test_a_seed_is_a_story(stories: list[Story]) -> None:
    assert generate_story(random.Random(7)) == stories[7]
    assert opening(random.Random(7)) == opening(random.Random(7))
    assert story_text(3, 5) == story_text(3, 5) != story_text(4, 5)


def test_no_two_stories_are_alike(stories: list[Story]) -> None:
    assert len({story.text for story in stories}) == COUNT
    # Nor the same with other names: without the reserved words, too, hardly any two agree.
    words = re.compile(r"\b(" + "|".join([*NAMES, *SPECIES, *ADJECTIVES, *NOUNS, *PLACES]) + r")\b")
    assert len({words.sub("", story.text) for story in stories}) > 0.99 * COUNT


def test_every_plot_and_every_word_is_used(stories: list[Story]) -> None:
    assert {story.plot for story in stories} == {plot.name for plot in PLOTS} | {"miniature"}
    assert {story.facts.name for story in stories} == set(NAMES)
    assert {story.facts.species for story in stories} == set(SPECIES)
    assert {story.facts.noun for story in stories} == set(NOUNS)
    assert {story.facts.adjective for story in stories} == set(ADJECTIVES)
    assert {story.facts.place for story in stories} == set(PLACES)


def test_lengths_spread_over_the_whole_range(stories: list[Story]) -> None:
    words = sorted(len(story.text.split()) for story in stories)
    assert words[0] >= 62, "80 tokens are about 62 words"
    assert words[-1] <= 770, "1,000 tokens are about 780 words"
    assert words[COUNT // 10] < 130
    assert words[-COUNT // 10] > 500


def test_some_stories_leave_ascii(stories: list[Story]) -> None:
    text = "".join(story.text for story in stories)
    assert "Zoë" in text and "café" in text
    for script in ("Γεια", "こんにちは", "Привет", "שלום", "नमस्ते", "🌟", "❤️"):
        assert script in text


UNCLEAN = {
    "an unfilled slot or an unmade choice": r"[\[\]{}|_]",
    "a double space": r"  ",
    "a space before punctuation": r" [.,!?;:]",
    "doubled punctuation": r"(?<!\.)[.,!?;:]{2}(?!\.)",
    "a before a vowel": r"\b[Aa] (?!one|once|eu|uni|use)[aeioéÉ]\w+",
    "an before a consonant": r"\b[Aa]n [^aeiouAEIOUhé\W]\w+",
    "a small letter after a full stop": r"[.!?] [a-zé]",
    "a doubled word": r"\b(?!far\b|long\b)(\w{2,}) \1\b",
    "a space inside a quotation": r'(?:^|\s)" | "(?:$|\s)',
    "a paragraph with a blank edge": r"\n | \n|\n{3}",
}


@pytest.mark.parametrize("fault", UNCLEAN)
def test_text_is_clean(fault: str, stories: list[Story]) -> None:
    pattern = re.compile(UNCLEAN[fault])
    found = [match.group() for story in stories for match in [pattern.search(story.text)] if match]
    assert not found, f"{fault}: {found[:5]}"


def test_quotation_marks_pair_up(stories: list[Story]) -> None:
    for story in stories:
        for paragraph in story.text.split("\n\n"):
            assert paragraph.count('"') % 2 == 0, paragraph
            assert paragraph[-1] in '.!?"', paragraph


def test_unbalanced_templates_are_refused() -> None:
    for text in ("[a|b", "a]", "[a|[b]"):
        with pytest.raises(ValueError, match="template"):
            compile_template(text)


def test_held_out_combinations_are_never_in_the_corpus(stories: list[Story]) -> None:
    assert not any(is_held_out(story.facts) for story in stories)
    prompts = [opening(random.Random(seed)) for seed in range(300)]
    assert all(is_held_out(prompt.facts) for prompt in prompts)
    assert len({prompt.facts for prompt in prompts}) == 300


def test_an_opening_names_every_fact() -> None:
    for seed in range(500):
        prompt = opening(random.Random(seed))
        facts = prompt.facts
        assert "\n" not in prompt.text
        for fact in (facts.name, facts.species, facts.friend, facts.friend_species, facts.object, facts.place):
            assert re.search(rf"\b{fact}\b", prompt.text), f"{fact!r} is not in {prompt.text!r}"


def test_the_checker_passes_every_story_of_the_grammar(stories: list[Story]) -> None:
    for story in stories:
        assert not check_story(story.text, story.facts), story.text


def _other(words: list[str], *taken: str) -> str:
    return next(word for word in words if word not in taken)


def _exchange(story: Story, fact: str) -> str:
    """The text with one fact exchanged for another word of its list, from the last paragraph on."""
    facts = story.facts
    exchanged = {
        "name": (facts.name, _other(list(NAMES), facts.name, facts.friend)),
        "friend": (facts.friend, _other(list(NAMES), facts.name, facts.friend)),
        "friend for name": (facts.name, facts.friend),
        "noun": (facts.noun, _other(list(NOUNS), facts.noun)),
        "adjective": (facts.object, f"{_other(list(ADJECTIVES), facts.adjective)} {facts.noun}"),
    }
    old, new = exchanged[fact]
    head, last = story.text.rsplit("\n\n", 1)
    return head + "\n\n" + re.sub(rf"\b{old}\b", new, last)


@pytest.mark.parametrize("fact", ["name", "friend", "friend for name", "noun", "adjective"])
def test_the_checker_catches_an_exchange_in_the_last_paragraph(fact: str, stories: list[Story]) -> None:
    for story in stories[:500]:
        assert check_story(_exchange(story, fact), story.facts), story.text


def test_the_checker_catches_an_exchange_anywhere(stories: list[Story]) -> None:
    """One exchanged mention in the middle of a story is enough, for the words that occur in no other role."""
    for story in stories[:500]:
        for old, others in ((story.facts.name, NAMES), (story.facts.noun, NOUNS), (story.facts.friend, NAMES)):
            mentions = list(re.finditer(rf"\b{old}\b", story.text))
            mention = mentions[len(mentions) // 2]
            new = _other(list(others), story.facts.name, story.facts.noun, story.facts.friend)
            assert check_story(story.text[: mention.start()] + new + story.text[mention.end() :], story.facts)


def test_the_checker_catches_a_change_of_species() -> None:
    facts = Facts("Pip", "fox", "Zoë", "otter", "red", "kite", "Mossbury")
    text = "Pip the {} met Zoë the otter.\n\nPip and Zoë had the red kite."
    assert check_story(text.format("fox"), facts) == []
    assert check_story(text.format("otter"), facts) == ["Pip has become otter"]
    assert check_story(text.format("badger"), facts)
    assert check_story(text.format("fox"), replace(facts, adjective="blue"))


def test_the_checker_wants_an_end(stories: list[Story]) -> None:
    for story in stories[:500]:
        assert "the story breaks off" in check_story(story.text[:-4], story.facts)


def test_the_corpus_is_stories_in_order_each_with_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.corpus.VOCAB_SIZE", 600)
    tokenizer = train_tokenizer(0, 50)
    monkeypatch.setattr("training.corpus.STORIES_PER_CHUNK", 10)
    corpus = build_corpus(tokenizer, 0, 20_000)
    assert 20_000 <= len(corpus.tokens) == corpus.offsets[-1] == corpus.lengths.sum()
    texts = [story_text(0, index) for index in range(len(corpus.lengths) + corpus.too_long)]
    short = [text for text in texts if len(tokenizer.encode(text)) <= 1000]
    starts = corpus.offsets.tolist()
    told = [corpus.tokens[start:end].tolist() for start, end in pairwise(starts)]
    assert [tokenizer.decode(story) for story in told] == short and all(story[-1] == EOS_ID for story in told)


@pytest.mark.skipif(not ASSETS.exists(), reason="the embedded model has not been trained yet")
def test_the_report_is_the_one_of_its_figures() -> None:
    training = json.loads((ASSETS / "training.json").read_text(encoding="utf-8"))
    assert (ASSETS / "README.md").read_text(encoding="utf-8") == render_readme(training)
    assert training["stories"]["share"] >= 0.95
