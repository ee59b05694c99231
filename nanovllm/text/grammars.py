"""Structured outputs: which tokens may come next, as bit masks for the sampler.

llguidance does the work: it compiles a schema or a grammar, follows the output with an Earley parser over lexemes, and
finds the allowed tokens in a trie of the vocabulary. This module has the rules: which grammars are accepted, and what
they may cost. EOS is allowed exactly where the grammar may end.

The first request that needs llguidance imports it and makes its view of the vocabulary. With 150,000 tokens this takes
a second.
"""

import json
import os
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import count
from operator import itemgetter
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nanovllm.structured_outputs import StructuredOutputsParams
from nanovllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

Masks = NDArray[np.int32]

MAX_COMPILED = 64  # roots that are kept for the next request with the same grammar
MOST_ROOTS = 48  # of one grammar
OUT_OF_USE = 64  # a grammar that so many requests have not asked for makes room for others
MAX_THREADS = 16  # that fill the masks of a step
# Tokens without quotes, backslashes and control characters, by their number of characters. Where a string may still get
# as many characters, all tokens of a slice are allowed without a look at them.
SLICES = [rf'[^"\\\x00-\x1F\x7F]{{1,{n}}}' for n in (2, 4, 6, 8, 12, 16, 24, 32)] + [r'[^"\\\x00-\x1F\x7F]+']
# Between the parts of JSON: a line break, blanks, or both. JSON allows any amount, but then small models may not stop.
WHITESPACE = r"\r?\n[ \t]{0,20}|[ \t]{1,20}"
# What one grammar may cost, in llguidance's units. The comments are for a core of 2024.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,  # compiling: 20 ms
    "step_lexer_fuel": 100_000,  # a mask: 7 ms, and up to 0.2 MB that a root keeps
    "step_max_items": 50_000,  # a mask: 3 ms
    "max_items_in_row": 20_000,  # rules that may be open at once, as for an object with many optional properties
    "max_lexer_states": 20_000,  # a root: 40 MB as a rule, 90 MB at worst
    "max_grammar_size": 500_000,
    "verbose_errors": False,  # which would show the grammar in messages and logs
}
# Where only one text can follow, llguidance would tokenize all of this text in every step, to allow only the tokens
# that the tokenizer would choose. With a regular expression like a{150000} this would cost 0.1 s per step.
NO_FORCING = '%llguidance {"no_forcing": true}'
OF_REGEX = r"\.+*?()|[]{}^$#&-~"  # characters that mean something in a regular expression


class Roots:
    """Matchers at the start of outputs, all of one grammar.

    The copies of a matcher share what its lexer has learnt, and a lock on that. So the masks of one root's copies are
    filled one after another. Those of several roots are filled at the same time, and each root learns for itself.
    """

    def __init__(self, first: "LLMatcher") -> None:
        self._all = [first]
        self.last_asked = 0  # the number of the latest request for this grammar
        self.failed = False  # whether an output has failed: a lexer that is full would fail all who begin with it
        self._lock = Lock()  # a matcher cannot be copied by two threads at once
        self._turns = count()

    def __len__(self) -> int:
        return len(self._all)

    def add(self, root: "LLMatcher") -> None:
        self._all.append(root)

    def drop(self) -> None:
        """Forget one of several roots. Its copies go on."""
        with self._lock:
            self._all.pop()

    def copy(self) -> "TokenMatcher":
        with self._lock:
            number = next(self._turns) % len(self._all)
            return TokenMatcher(self._all[number].deep_copy(), self, number)


class TokenMatcher:
    """Where one output is in its grammar: see `engine/grammars.py`. The matcher began as a copy of root `number`."""

    def __init__(self, ll: "LLMatcher", roots: Roots, number: int) -> None:
        self.ll, self.roots, self.number = ll, roots, number
        self.at_start = True

    def copy(self) -> "TokenMatcher":
        if self.at_start:
            return self.roots.copy()
        found = TokenMatcher(self.ll.deep_copy(), self.roots, self.number)
        found.at_start = False
        return found

    def accept(self, token_id: int) -> str | None:
        self.at_start = False
        # llguidance never leaves a state of error, but would still accept EOS in this state.
        if not self.ll.is_error() and self.ll.consume_token(token_id):
            return None
        self.roots.failed = True
        return f"structured_outputs: the output cannot go on here ({reason(self.ll.get_error())})"

    def num_valid(self, token_ids: Sequence[int]) -> int:
        return self.ll.validate_tokens(list(token_ids))


class TokenGrammars:
    """Compiles grammars and fills masks, for one vocabulary.

    vocab_size: the model's, which may be larger than the tokenizer's. The additional ids are padding, and never
    allowed. num_threads: that fill masks (default: by the cores). A grammar that is asked for again and again gets
    `num_roots` roots.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int], num_threads: int | None = None
    ) -> None:
        self.tokenizer, self.vocab_size, self.eos_token_ids = tokenizer, vocab_size, sorted(eos_token_ids)
        self.num_threads = num_threads or min(MAX_THREADS, os.cpu_count() or 1)
        # Of a grammar. The fewer there are, the more often a thread waits for a root that another thread uses.
        self.num_roots = min(MOST_ROOTS, 4 * self.num_threads) if self.num_threads > 1 else 1
        self._lock = Lock()  # guards what follows
        self._compiled: OrderedDict[StructuredOutputsParams, Roots] = OrderedDict()
        self._num_asked = 0  # requests so far
        self._ll: LLTokenizer | None = None
        # Made together with `_ll`
        self._limits: LLParserLimits
        self._threads: LLExecutor
        self._width = 0  # words of a mask
        self._known: Masks  # [W] the mask of all ids but the padding

    def compile(self, params: StructuredOutputsParams) -> TokenMatcher:
        """Compile a grammar. Returns a matcher at the start of an output. Any thread may call this.

        Raises ValueError for a grammar that llguidance cannot enforce, that costs too much, or that allows no output
        but the empty one. The message names the keyword or the place that is to blame. Raises RuntimeError if
        llguidance itself fails.
        """
        with self._lock:
            if self._ll is None:
                self._start()
            self._num_asked += 1
            found = self._compiled.get(params)
            if found is not None and found.failed:
                del self._compiled[params]
            elif found is not None:
                found.last_asked = self._num_asked
                self._compiled.move_to_end(params)
                if len(found) >= self.num_roots or not self._has_room(found):
                    return found.copy()
        try:
            root = self._compile(params)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of Rust, and no Exception: nobody would catch it
                raise
            raise RuntimeError(f"structured_outputs.{params.kind}: llguidance has failed: {error}") from error
        with self._lock:
            if is_new := (found := self._compiled.get(params)) is None:
                found = self._compiled[params] = Roots(root)
                found.last_asked = self._num_asked
            elif len(found) < self.num_roots:
                found.add(root)
            while sum(map(len, self._compiled.values())) > MAX_COMPILED and len(self._compiled) > 1:
                oldest = next(iter(self._compiled))
                giver = self._compiled[oldest]
                if not is_new and not self._is_out_of_use(giver):
                    giver = max(self._compiled.values(), key=len)
                if len(giver) > 1:
                    giver.drop()
                else:
                    del self._compiled[oldest]
        return found.copy()

    def _is_out_of_use(self, roots: Roots) -> bool:
        return self._num_asked - roots.last_asked > OUT_OF_USE

    def _has_room(self, roots: Roots) -> bool:
        """Whether a grammar may get another root. Among grammars that are in use, a grammar gives a root only to one
        that has at least two fewer. Without this rule they would take each other's roots, and be compiled again and
        again."""
        every = list(self._compiled.values())
        has_room = sum(map(len, every)) < MAX_COMPILED or self._is_out_of_use(every[0])
        return has_room or max(map(len, every)) > len(roots) + 1

    def fill(self, wanted: Sequence[tuple[TokenMatcher, Sequence[int]]], masks: Masks) -> None:
        """Fill the masks of the tokens that may come next in each output, and after each of the output's guesses.

        masks [N, ceil(vocab_size / 32)]: a row for each mask, in order; contiguous. See `StepMasks`.

        Several threads share the work, without Python's lock. Neighbours go to the same thread, so the copies of a root
        are made neighbours: threads that wait for each other's root would be slower than one.
        """
        if masks.shape[1] != self._width:  # the tokenizer has more tokens than the model
            wider = np.empty((len(masks), self._width), dtype=np.int32)
            self.fill(wanted, wider)
            masks[:] = wider[:, : masks.shape[1]]
            return
        place, plain, guessed = 0, [], []
        for matcher, guesses in wanted:
            if guesses:
                guessed.append((matcher.ll, place, list(guesses)))
                masks[place + 1 : place + len(guesses) + 1] = -1  # llguidance stops at a guess that is not possible
            else:
                plain.append((matcher.number, place, matcher.ll))
            place += len(guesses) + 1
        where = masks.ctypes.data, 4 * self._width, len(masks)
        if plain:
            plain.sort(key=itemgetter(0))
            self._threads.unsafe_compute_mask_ptr([(ll, place) for _, place, ll in plain], *where)
        if guessed:
            self._threads.unsafe_compute_mask_ptr_with_draft_token(guessed, *where)
        if self._padded < self._width:
            masks[:, self._padded :] &= self._known[self._padded :]

    def _start(self) -> None:
        from llguidance import LLExecutor, LLParserLimits, LLTokenizer

        fast = self.tokenizer.fast
        num_known = max(fast.get_vocab(with_added_tokens=True).values()) + 1
        num_ids = max(self.vocab_size, num_known)
        # Files name ids that the model or the tokenizer does not have, -1 among them.
        eos_token_ids = [i for i in self.eos_token_ids if 0 <= i < min(self.vocab_size, num_known)]
        if not eos_token_ids:
            raise ValueError(
                "structured_outputs needs an EOS token to end with, and neither model nor tokenizer names one that "
                "both have"
            )
        self._width = -(-num_ids // 32)
        known = np.arange(32 * self._width) < min(self.vocab_size, num_known)
        self._known = np.packbits(known, bitorder="little").view(np.int32)
        self._padded = int(np.argmin(self._known == -1)) if (self._known != -1).any() else self._width
        self._limits = LLParserLimits(**LIMITS)
        self._threads = LLExecutor(self.num_threads)
        self._ll = LLTokenizer(fast.to_str(), n_vocab=num_ids, eos_token=eos_token_ids, slices=SLICES)

    def _compile(self, params: StructuredOutputsParams) -> "LLMatcher":
        from llguidance import LLMatcher

        name = f"structured_outputs.{params.kind}"
        assert self._ll is not None
        try:
            text = LLMatcher.grammar_from_lark(f"{lark_rules(params)}\n{NO_FORCING}\n")
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        matcher = LLMatcher(self._ll, text, log_level=0, limits=self._limits)
        first = TokenMatcher(matcher, Roots(matcher), 0)
        # The first mask takes longest, so it is computed here. It also shows whether any first token is allowed.
        allowed = np.zeros((1, self._width), dtype=np.int32)
        if not matcher.is_error():
            self.fill([(first, ())], allowed)
        if matcher.is_error():
            raise ValueError(
                f"{name} cannot be enforced: {reason(matcher.get_error())}; leave that out, or simplify it"
            )
        ids = set(np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little")).tolist())
        if not ids - set(self.eos_token_ids):
            raise ValueError(f"{name} allows no output but the empty one; got {getattr(params, params.kind)!r:.100}")
        return matcher


def lark_rules(params: StructuredOutputsParams) -> str:
    """The grammar in Lark, as llguidance knows it, with a rule `start`. Raises ValueError for a grammar that cannot be
    translated."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if params.grammar is not None:
        if "%llguidance" in params.grammar:
            raise ValueError("%llguidance, which sets options, is not allowed; leave it out")
        try:
            rules: str = any_to_lark(params.grammar).removeprefix("%llguidance {}")  # which it puts before GBNF
        except Exception as error:  # an error of llguidance's own, or a RecursionError
            raise ValueError(
                f"no rule 'start:', as in Lark, so it was read as GBNF, but: {reason(str(error))}"
            ) from None
    elif params.kind in ("regex", "choice"):
        # Choices do not become rules of a grammar: the parser of rules takes seconds for thousands of them.
        texts = ["".join("\\" + c if c in OF_REGEX else c for c in text) for text in params.choice or ()]
        made = LLMatcher.grammar_from_regex(params.regex or "|".join(texts))
        rules = json.loads(made)["grammars"][0]["lark_grammar"]  # a rule with the expression between slashes
    else:
        options: dict[str, Any] = {"whitespace_pattern": params.whitespace_pattern or WHITESPACE}
        if params.disable_any_whitespace:
            options = {"whitespace_flexible": False}
        schema = {"type": "object"} if params.json_object else json.loads(str(params.json))
        rules = f"start: %json {json.dumps(schema | {'x-guidance': options})}"  # overrides a client's own options
    return rules


def reason(error: str) -> str:
    """llguidance's message in one line, without the lines that show the place in the text."""
    said = re.sub(r"\n *\d+ \|.*", "", error, flags=re.DOTALL).replace("<non-verbose/>", "")
    said = " ".join(re.sub(r"^at [\d()]+: failed to compile JSON schema:", "", said).split())
    return {"": "the grammar has ended", "NoExtensionBias": "no output matches it"}.get(said, said[:500])
