"""Finding stop strings in text that arrives piece by piece."""

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """Finds the first stop string in the text of an output: in the text that is shown, or in the text together with the
    special tokens that are hidden in it. A stop string may begin or end in the middle of a hidden token.

    The first stop string to be complete wins. Of those that are complete at the same character, the one that begins
    first wins. So the result does not depend on how the text is cut into tokens.

    num_shown: number of characters of the shown text so far.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.num_shown = 0
        self._shown = Matcher(stops)
        self._whole: Matcher | None = None  # reads hidden tokens as well, once there is one
        # Of the characters that `_whole` read last: the number of shown characters before each.
        self._places: deque[int] = deque(maxlen=len(self._shown.stops[0]))

    @property
    def settled(self) -> int:
        """No stop string can begin before this character of the shown text."""
        settled = self.num_shown - self._shown.held
        if self._whole is not None and (held := self._whole.held):
            settled = min(settled, self._places[-held])
        return settled

    def copy(self) -> "StopStrings":
        other = StopStrings(self._shown.stops)
        other.num_shown, other._shown, other._places = self.num_shown, self._shown.copy(), self._places.copy()
        other._whole = None if self._whole is None else self._whole.copy()
        return other

    def feed(self, text: str, may_stop: bool, hidden: bool = False) -> tuple[int, int, str] | None:
        """Read on. Returns the stop string that is met first, behind the numbers of shown characters before its
        beginning and before its end; None if there is none.

        Without `may_stop`, a string that is completed does not count; a string that is only begun may count later.
        """
        if hidden and self._whole is None:  # nothing was hidden until now
            self._whole = self._shown.copy()
            self._places.extend(range(self.num_shown - (self._places.maxlen or 0), self.num_shown))
        found: list[tuple[int, int, int, str]] = []  # characters of `text` up to the end; what is returned
        if not hidden and (met := self._shown.feed(text, may_stop)):
            end = self.num_shown + met[0]
            found.append((met[0], end - len(met[1]), end, met[1]))
        if self._whole is not None:
            places = [self.num_shown + (0 if hidden else i) for i in range(len(text) + 1)]
            if met := self._whole.feed(text, may_stop):
                begin = [*self._places, *places][len(self._places) + met[0] - len(met[1])]
                found.append((met[0], begin, places[met[0]], met[1]))
            self._places.extend(places[:-1])
        if not hidden:
            self.num_shown += len(text)
        return min(found, key=lambda met: (met[0], met[1], -len(met[3])))[1:] if found else None


class Matcher:
    """Reads a text character by character, and knows how much of its end may be the beginning of one of some strings.

    Each character is looked at once, however long the strings are (Knuth, Morris & Pratt, "Fast Pattern Matching in
    Strings", 1977).

    stops: the strings, the longest first.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = sorted(set(stops), key=len, reverse=True)
        self._borders = [borders(stop) for stop in self.stops]
        self._matched = [0] * len(self.stops)  # length of the text's longest end with which each string begins

    @property
    def held(self) -> int:
        """How many characters at the end of the text may still become one of the strings."""
        return max(self._matched)

    def copy(self) -> "Matcher":
        other = Matcher(())
        other.stops, other._borders, other._matched = self.stops, self._borders, self._matched.copy()
        return other

    def feed(self, text: str, may_stop: bool) -> tuple[int, str] | None:
        """Read on. Returns the number of characters of `text` up to the end of the first string, and that string; None
        if there is none, or none that counts. The text behind it is not read."""
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
