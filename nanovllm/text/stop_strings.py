"""Finding stop strings in text that arrives piece by piece."""

from collections.abc import Sequence


class StopStrings:
    """Follows a text character by character, and knows how much of its end may be the beginning of a stop string.

    The first stop string to be complete wins, and the longest of those that are complete at the same character, so that
    the result does not depend on how the text is cut into tokens. (Knuth, Morris & Pratt, "Fast Pattern Matching in
    Strings", 1977: each character is looked at once, however long the strings are.)
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._borders = [borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # length of the text's longest end with which each stop string begins

    @property
    def held(self) -> int:
        """How many characters at the end of the text may still become a stop string."""
        return max(self._matched)

    def feed(self, text: str, may_stop: bool) -> tuple[int, str] | None:
        """Read on. The number of characters of `text` up to the end of the first stop string, and that string; or None.

        Without `may_stop` strings that are completed do not count; one that is only begun may count later.
        """
        for position, character in enumerate(text):
            found = None
            for i, (stop, border) in enumerate(zip(self._stops, self._borders, strict=True)):
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
