"""The log-probabilities of an output, as a caller reads them: each entry is made when it is first read.

With `logprobs=5`, a step of 256 sequences brings 1,500 log-probabilities. As objects they would soon be most of what
the process holds. Garbage collections look at all objects, and no step is submitted meanwhile. (vLLM has `FlatLogprobs`
for the same reason, where a request asks for them.)
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import overload

from nanovllm.engine.plan import TokenLogprobs
from nanovllm.outputs import Logprob

Entry = dict[int, Logprob]


class GrowingLogprobs:
    """Takes in the log-probabilities of one output. One thread adds to them, and any thread may read them.

    with_text: makes the entry of the next position, from the token that was chosen there and what was found. It is
        called once for each position, in order, when the position is first read. None: entries have no text.
    total: the sum over the chosen tokens.
    """

    def __init__(self, with_text: Callable[[int, TokenLogprobs], Entry] | None = None) -> None:
        self.total = 0.0
        self._entry_of = with_text or (lambda _, found: without_text(found))
        self._length = 0
        self._entries: list[Entry] = []  # of the positions that were read
        # Of those after them. Not pairs: these would be objects, too
        self._chosen, self._found = deque[int](), deque[TokenLogprobs]()
        self._reading = Lock()

    def __len__(self) -> int:
        return self._length

    def add(self, chosen: Sequence[int], found: Sequence[TokenLogprobs]) -> None:
        """Take in those of new tokens, one entry for each token."""
        self._chosen += chosen
        self._found += found
        self._length += len(chosen)
        self.total += sum(entry[token][0] for token, entry in zip(chosen, found, strict=True))

    def entries(self, n: int) -> list[Entry]:
        """The entries of at least the first n positions."""
        with self._reading:
            for _ in range(len(self._entries), n):
                self._entries.append(self._entry_of(self._chosen.popleft(), self._found.popleft()))
            return self._entries


class OutputLogprobs(Sequence[Entry]):
    """The log-probabilities of the tokens that an output had when it was made: for each a dict, by token id.

    A `CompletionOutput` makes a list of them when somebody reads them.
    """

    def __init__(self, growing: GrowingLogprobs) -> None:
        self._growing, self._length = growing, len(growing)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...
    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        chosen = range(self._length)[index]
        entries = self._growing.entries(self._length)
        return entries[chosen] if isinstance(chosen, int) else [entries[i] for i in chosen]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._growing.entries(self._length)[: self._length])


def without_text(found: TokenLogprobs) -> Entry:
    return {token_id: Logprob(value, rank) for token_id, (value, rank) in found.items()}
