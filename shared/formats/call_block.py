"""Reads a block of calls: what opens it, the calls, what closes it."""

from __future__ import annotations

from collections.abc import Sequence

from shared.formats.call_reading import CallableTools, CallReading
from shared.formats.description import CallForm
from shared.formats.events import EventList
from shared.formats.text_source import Markers, Reading, TextSource, markers

# What models write too much of behind arguments.
_SURPLUS = " \t\n\r}])\"',;"


class CallBlock:
    """Reads blocks of one answer. It keeps nothing between blocks."""

    def __init__(self, source: TextSource, tools: CallableTools, events: EventList) -> None:
        self._source = source
        self._tools = tools
        self._offered = CallableTools(tools.offered, is_exclusive=True)
        self._events = events

    def read(self, forms: Sequence[CallForm], *, in_reasoning: bool) -> Reading[str | None]:
        """Read the block whose opening has just been read and recorded.

        Args:
            forms: Those that open so.
            in_reasoning: It stands in reasoning, which a call would end. A thought may be about a tool that there is
                not: then only offered tools are called.

        Returns:
            None after calls; the text read where there is no call, so that it is ordinary text.
        """
        source = self._source
        opening = source.recorded()
        source.mark()
        for form in forms:
            yield from source.skip_space()
            tools = self._offered if in_reasoning else self._tools
            if (yield from source.accept_spaced(form.begin)) and (yield from self._read_call(form, tools)):
                source.recorded()
                yield from self._read_rest(form)
                return None
            source.rewind()
        source.recorded()
        return opening

    def _read_call(self, form: CallForm, tools: CallableTools) -> Reading[bool]:
        """Read one call; return True if there was one, however incomplete."""
        call = CallReading(self._source, tools, _strong_closes(form), self._events)
        yield from self._source.skip_space()
        for part in form.parts:
            if not (yield from part.read(call)):
                break
        is_cut = self._source.has_ended and not call.has_started and self._source.is_empty()
        if is_cut and call.tool is not None and tools.is_offered(call.tool):
            call.start()
        return call.has_started

    def _drop_rest(self) -> None:
        """Forget the unread rest of a text that has ended inside a block: it is the beginning of a marker."""
        if self._source.has_ended:
            self._source.take(len(self._source.text))

    def _read_rest(self, form: CallForm) -> Reading[None]:
        source = self._source
        while True:
            yield from source.skip_space()
            if (yield from self._read_close(form)):
                return
            if form.separator is None:
                self._drop_rest()
                return
            source.mark()
            if form.separator:
                yield from source.accept(form.separator)
            if not (yield from self._read_call(form, self._tools)):
                self._drop_rest()
                if not source.has_ended:
                    source.rewind()
                source.recorded()
                return
            source.recorded()

    def _read_close(self, form: CallForm) -> Reading[bool]:
        """Read the close of a block, and brackets too many before it; return True if it was there."""
        if not form.closes:
            return False
        if (yield from self._source.accept(*form.closes)):
            return True
        self._source.mark()
        yield from self._source.skip(_SURPLUS)
        if (yield from self._source.accept(*_strong_closes(form).texts)):
            self._source.recorded()
            return True
        if not self._source.has_ended:
            self._source.rewind()
        self._source.recorded()
        return False


def _strong_closes(form: CallForm) -> Markers:
    """Return the closes that cannot be a part of arguments outside of strings."""
    return markers(*(each for each in form.closes if len(each) > 2))
