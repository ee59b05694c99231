"""Turn `bad_words` into the token ids that spell them."""

from nanovllm.sampling_params import MAX_BAD_TOKENS, MAX_BAD_WORDS, SamplingParams
from nanovllm.text.tokenizer import Tokenizer


def with_spellings(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """The same parameters, with `bad_words_ids` filled in if there are bad words.

    A word has one spelling at the beginning of a text and another behind a space. Both are ruled out, however the word
    was given, as in vLLM. Unlike in vLLM, this holds even if the two differ in length. Raises ValueError for words that
    cannot be spelled, or that have more tokens than there is room for.
    """
    if not params.bad_words:
        return params
    if tokenizer is None:
        raise ValueError(f"bad_words={params.bad_words!r} needs a tokenizer, and there is none; use logit_bias")
    spellings: dict[tuple[int, ...], None] = {}  # each once, in order
    for word in params.bad_words:
        if any("\ud800" <= c <= "\udfff" for c in word):
            raise ValueError(f"bad_words has half a surrogate pair, which is no character; got {word!r}")
        bare = word.lstrip() or word  # a word of white space alone is spelled as it is
        for text in dict.fromkeys((bare, bare if bare.isspace() else f" {bare}")):
            if ids := tokenizer.encode(text, special_tokens=False):
                spellings[tuple(ids)] = None
            elif text == bare:
                raise ValueError(f"bad_words contains {word!r}, of which the tokenizer makes no token; leave it out")
    num_tokens = sum(map(len, spellings))
    if len(spellings) > MAX_BAD_WORDS or num_tokens > MAX_BAD_TOKENS:
        raise ValueError(
            f"bad_words has {len(spellings)} spellings, with and without a space before each word, of {num_tokens} "
            f"tokens together; there is room for {MAX_BAD_WORDS} and for {MAX_BAD_TOKENS}: leave some out"
        )
    return params.changed(bad_words_ids=tuple(spellings))
