"""The text of one sequence as it grows: detokenizer and stop strings, folded over tokens."""

from __future__ import annotations

from collections.abc import Iterable

from gpu_worker.text.detokenizer import Detokenizer
from gpu_worker.text.stop_strings import StopStrings
from shared.sampling import Sampling


class OutputText:
    """What the client gets to read, piece by piece."""

    def __init__(self, detokenizer: Detokenizer, sampling: Sampling) -> None:
        """Start with no tokens. Of `sampling`, what says how the text ends counts."""
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

    def replay(self, token_ids: Iterable[int]) -> None:
        """Advance by tokens whose text the client already has."""
        for token_id in token_ids:
            self.feed(token_id)

    def finish(self) -> str:
        """Return the text that was held back, for a sequence that ends without a stop string."""
        text = self._detokenizer.flush()
        if self._stops is None:
            return text
        text = self._stops.feed(text)
        return text if self._stops.is_matched else text + self._stops.flush()
