"""Finding stop strings in text that arrives in pieces, without ever sending a part of one."""

from __future__ import annotations


class StopStrings:
    """Passes text through, holding back the longest suffix that may still become a stop string.

    Each stop string is followed by a Knuth-Morris-Pratt automaton, so the cost per character does not depend on the
    strings' lengths. When several stop strings end in one piece, the one that starts first wins.

    Attributes:
        is_matched: A stop string was found; the text before it has been passed through, and nothing follows.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        """Look for any of these strings, none of them empty."""
        self.is_matched = False
        self._held = ""
        self._first_characters = frozenset(stop[0] for stop in stops)
        self._stops = [(stop, _failure_links(stop)) for stop in stops]
        self._states = [0] * len(stops)

    def feed(self, piece: str) -> str:
        """Return the text that is certain not to belong to a stop string."""
        if self.is_matched or not piece:
            return ""
        if not self._held and self._first_characters.isdisjoint(piece):
            return piece
        text = self._held + piece
        start = self._find_start(piece)
        if start is not None:
            self.is_matched = True
            self._held = ""
            return text[:start]
        cut = len(text) - max(self._states)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Return what was held back: the text has ended, and no stop string with it."""
        held, self._held = self._held, ""
        return held

    def _find_start(self, piece: str) -> int | None:
        """Advance all automata; return where in held text + piece the first complete stop string starts."""
        num_held = len(self._held)
        found: int | None = None
        for index, (stop, links) in enumerate(self._stops):
            state = self._states[index]
            for position, character in enumerate(piece):
                while state and stop[state] != character:
                    state = links[state]
                state += stop[state] == character
                if state == len(stop):
                    start = num_held + position + 1 - state
                    found = start if found is None else min(found, start)
                    break
            self._states[index] = state
        return found


def _failure_links(stop: str) -> list[int]:
    """Return, for each matched length, the next shorter length that is still a match."""
    links = [0] * (len(stop) + 1)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = links[length]
        length += stop[index] == stop[length]
        links[index + 1] = length
    return links
