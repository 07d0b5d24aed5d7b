"""The text of one sequence as it grows: detokenizer and stop strings, folded over tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

from gpu_worker.text.detokenizer import Detokenizer
from shared.sampling import Sampling

# Pieces that are searched at once where their text is not needed.
_PIECES_AT_ONCE = 1024


class StopStrings:
    """Passes text through, holding back the longest suffix that may still become a stop string.

    Each stop string has a Knuth-Morris-Pratt automaton, built as far as the text has matched, so the cost per character
    does not depend on the strings' lengths. Of several that end in one piece, the one that starts first wins.

    Attributes:
        matched: The stop string that was found: the text before it has been passed through, and nothing follows.
    """

    def __init__(self, stops: tuple[str, ...], *, is_passed: bool = False) -> None:
        """Look for any of these strings, none of them empty; `is_passed` passes the one that is found through too."""
        self._is_passed = is_passed
        self.matched: str | None = None
        self._held = ""
        self._first_characters = frozenset(stop[0] for stop in stops)
        self._automata = [_Automaton(stop) for stop in stops]

    @property
    def is_matched(self) -> bool:
        """Whether a stop string was found."""
        return self.matched is not None

    def feed(self, piece: str) -> str:
        """Return the text that is certain not to belong to a stop string."""
        if self.is_matched or not piece:
            return ""
        if not self._held and self._first_characters.isdisjoint(piece):
            return piece
        text = self._held + piece
        found = self._find_first(piece)
        if found is not None:
            start, self.matched = found
            self._held = ""
            return text[: start + len(self.matched)] if self._is_passed else text[:start]
        cut = len(text) - max(automaton.num_matched for automaton in self._automata)
        self._held = text[cut:]
        return text[:cut]

    def skip(self, pieces: Iterable[str]) -> None:
        """Advance as `feed` does without returning text; many pieces are searched at once."""
        num_kept = max(len(automaton.stop) for automaton in self._automata) - 1
        rest, tail = iter(pieces), self._held
        while not self.is_matched and (several := list(islice(rest, _PIECES_AT_ONCE))):
            text = tail + "".join(several)
            if any(automaton.stop in text for automaton in self._automata):
                self._restart(tail)
                deque(map(self.feed, several), maxlen=0)
            else:
                tail = text[max(0, len(text) - num_kept) :]
        if not self.is_matched:
            self._restart(tail)

    def _restart(self, tail: str) -> None:
        """Begin anew behind a text whose last characters these are, and which has no stop string."""
        for automaton in self._automata:
            automaton.num_matched = 0
            automaton.feed(tail[max(0, len(tail) - len(automaton.stop) + 1) :])
        self._held = tail[len(tail) - max(automaton.num_matched for automaton in self._automata) :]

    def flush(self) -> str:
        """Return the text held back: the output has ended, and no stop string with it."""
        held, self._held = self._held, ""
        return held

    def _find_first(self, piece: str) -> tuple[int, str] | None:
        """Advance all automata; return where in held text + piece the first complete stop string starts, and which."""
        num_held = len(self._held)
        found: tuple[int, str] | None = None
        for automaton in self._automata:
            end = automaton.feed(piece)
            if end is not None:
                start = num_held + end - automaton.num_matched
                if found is None or start < found[0]:
                    found = (start, automaton.stop)
        return found


class _Automaton:
    """Follows one stop string; `num_matched` is the length of the text's longest suffix that is its prefix."""

    __slots__ = ("_links", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.num_matched = 0
        self.stop = stop
        # For each matched length, the next shorter length that is still a match; known up to `num_matched`.
        self._links = [0, 0]

    def feed(self, piece: str) -> int | None:
        """Add a piece of text; return where in it the stop string ends, or None when it is not complete."""
        stop, links, matched = self.stop, self._links, self.num_matched
        position = 0
        if not matched:
            position = piece.find(stop[0])
            if position < 0:
                return None
        for index in range(position, len(piece)):
            character = piece[index]
            while matched and stop[matched] != character:
                matched = links[matched]
            if stop[matched] == character:
                matched += 1
                if matched == len(links):
                    links.append(self._next_link())
            if matched == len(stop):
                self.num_matched = matched
                return index + 1
        self.num_matched = matched
        return None

    def _next_link(self) -> int:
        stop, links = self.stop, self._links
        last = stop[len(links) - 1]
        length = links[-1]
        while length and stop[length] != last:
            length = links[length]
        return length + (stop[length] == last)


class OutputText:
    """What the client gets to read, piece by piece."""

    def __init__(self, detokenizer: Detokenizer, sampling: Sampling) -> None:
        self._detokenizer = detokenizer
        self._stops: StopStrings | None = None
        if sampling.stop:
            self._stops = StopStrings(sampling.stop, is_passed=sampling.include_stop_str_in_output)
        # Tokens in whose text no stop string is looked for.
        self._num_unstopped = sampling.min_tokens

    @property
    def is_stopped(self) -> bool:
        """A stop string was found: the text is complete, and tokens that follow do not count."""
        return self._stops is not None and self._stops.is_matched

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return None if self._stops is None else self._stops.matched

    def feed(self, token_id: int) -> str:
        """Return the text that became certain with this token."""
        if self._stops is None:
            return self._detokenizer.feed(token_id)
        if self._num_unstopped:
            self._num_unstopped -= 1
            return self._detokenizer.feed(token_id)
        return self._stops.feed(self._detokenizer.feed(token_id))

    def replay(self, token_ids: Sequence[int]) -> None:
        """Advance by tokens whose text the client already has."""
        if self._stops is None:
            self._detokenizer.skip(token_ids)
            return
        pieces = map(self._detokenizer.feed, token_ids)
        self._num_unstopped -= sum(1 for _ in islice(pieces, self._num_unstopped))
        self._stops.skip(pieces)

    def finish(self) -> str:
        """Return the text that was held back, for a sequence that ends without a stop string."""
        text = self._detokenizer.flush()
        if self._stops is None:
            return text
        text = self._stops.feed(text)
        return text if self._stops.is_matched else text + self._stops.flush()
