"""Finding stop strings in text that arrives piece by piece."""

from collections import deque
from collections.abc import Callable, Sequence


class StopStrings:
    """Follows a text character by character, and knows how much of its end may be the beginning of a stop string.

    The first stop string to be complete wins, and the longest of those that are complete at the same character, so that
    the result does not depend on how the text is cut into tokens. (Knuth, Morris & Pratt, "Fast Pattern Matching in
    Strings", 1977: each character is looked at once, however long the strings are.)
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = sorted(set(stops), key=len, reverse=True)
        self._borders = [borders(stop) for stop in self.stops]
        self._matched = [0] * len(self.stops)  # length of the text's longest end with which each stop string begins

    @property
    def held(self) -> int:
        """How many characters at the end of the text may still become a stop string."""
        return max(self._matched)

    def begin_with(self, text: str) -> None:
        """Forget what was read, and read a text in which no stop string counts."""
        self._matched = [0] * len(self.stops)
        self.feed(text, may_stop=False)

    def feed(self, text: str, may_stop: bool) -> tuple[int, str] | None:
        """Read on. Returns the number of characters of `text` up to the end of the first stop string, and that string.

        Returns None if there is none. Without `may_stop`, a string that is completed does not count; a string that is
        only begun may count later.
        """
        for position, character in enumerate(text):
            found = None
            for i, (stop, border) in enumerate(zip(self.stops, self._borders, strict=True)):
                n = self._matched[i]
                while n and stop[n] != character:
                    n = border[n - 1]
                n += stop[n] == character
                if n == len(stop):
                    found = found or stop
                    n = border[n - 1]
                self._matched[i] = n
            if found and may_stop:
                return position + 1, found
        return None


class StopsAcrossHidden:
    """Finds stop strings in a text together with what is hidden in it: special tokens that are not shown.

    Only strings that have a whole hidden token in them are found here; `StopStrings` finds the others. Only as
    much of the text is remembered as the longest stop string is long.

    num_shown: number of characters of the shown text so far.
    settled: no stop string that has something hidden in it can begin before this character of the shown text.
    """

    def __init__(self, stops: Sequence[str], shown: str) -> None:
        """`stops`: the longest first. `shown`: the text before anything was hidden."""
        self._stops = stops
        # What was read last: characters and hidden tokens, each with its place in the shown text.
        self._recent: deque[tuple[str, int, bool]] = deque(maxlen=len(stops[0]))
        self.num_shown = self.settled = max(len(shown) - len(stops[0]), 0)
        self.feed(shown[self.num_shown :], hidden=False, may_stop=False)

    def feed(self, text: str, hidden: bool, may_stop: bool) -> tuple[int, int, str] | None:
        """Read on: characters, or one hidden token. Returns, for the first stop string that is complete, the numbers of
        shown characters before its beginning and before its end, and the string."""
        for part in [text] if hidden else text:
            self._recent.append((part, self.num_shown, hidden))
            self.num_shown += not hidden
            if may_stop and (found := self._find(str.__eq__)):
                return found[0], self.num_shown, found[1]
        begun = self._find(str.startswith)
        self.settled = begun[0] if begun else self.num_shown
        return None

    def _find(self, fits: Callable[[str, str], bool]) -> tuple[int, str] | None:
        """Of what was read, the longest end that has something hidden in it and fits a stop string: its place in the
        shown text, and the stop string."""
        found, end, has_hidden = None, "", False
        for part, place, hidden in reversed(self._recent if any(part[2] for part in self._recent) else ()):
            end, has_hidden = part + end, has_hidden or hidden
            if has_hidden and (stop := next((stop for stop in self._stops if fits(stop, end)), None)):
                found = place, stop
        return found


def borders(stop: str) -> list[int]:
    """For each beginning of `stop`, the length of its longest proper end that is a beginning as well."""
    table = [0] * len(stop)
    n = 0
    for i in range(1, len(stop)):
        while n and stop[i] != stop[n]:
            n = table[n - 1]
        n += stop[i] == stop[n]
        table[i] = n
    return table
