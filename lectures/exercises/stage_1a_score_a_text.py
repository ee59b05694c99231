"""Exercise 1a: Score a whole text in one pass through the model.

Stage 1 turns the last row of the hidden states into scores and throws the other rows away. They are worth something: a
token sees nothing that comes after it, so row i is what the model would have said after token i, had the text ended
there. Whoever knows the text already can read off how probable each of its tokens was. This is how language models are
trained, and how a guess of several tokens is checked at once.

    log_probs(engine, tokens) -> list[float]
        the natural logarithm of the probability of tokens[1], tokens[2] and so on, each given all that stand before it:
        one number less than there are tokens, from one pass through `engine.model`

    perplexity(engine, tokens) -> float
        exp of minus their mean: the model was as unsure as between so many tokens of equal chances

    preferred(engine, prompt, endings) -> int
        the index of the ending that is the most probable after the prompt (all of it, not token by token); of equals,
        the first

Then try it: which ending does the model prefer if the scarf was red, and which if it was green? Why does a longer
ending nearly always lose, and what would you divide by?

Check: .venv/bin/python -m tools.lectures.lecture_exercises 1a
"""

from stages.stage_1_naive import NaiveEngine


def log_probs(engine: NaiveEngine, tokens: list[int]) -> list[float]:
    raise NotImplementedError("exercise 1a: the log of the probability of every token but the first")


def perplexity(engine: NaiveEngine, tokens: list[int]) -> float:
    raise NotImplementedError("exercise 1a: exp of minus the mean of the logs")


def preferred(engine: NaiveEngine, prompt: list[int], endings: list[list[int]]) -> int:
    raise NotImplementedError("exercise 1a: the index of the most probable ending")
