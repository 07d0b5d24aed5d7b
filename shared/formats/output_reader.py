"""Reads an answer as it streams: which text is content, which is reasoning, and which is a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared.formats.call_block import CallBlock
from shared.formats.call_reading import CallableTools
from shared.formats.description import CallForm, ThinkTags
from shared.formats.events import ContentText, EventList, OutputEvent, ReasoningText
from shared.formats.text_source import Markers, Reading, TextSource, markers
from shared.formats.tools import Tool


class FormatReader:
    """Owns the state of one answer.

    White space is told only when text follows that belongs to it: what stands between reasoning, content and calls is
    markup.
    """

    def __init__(
        self,
        tags: ThinkTags | None,
        forms: Sequence[CallForm],
        dropped: Sequence[str],
        tools: Sequence[Tool],
        *,
        starts_in_reasoning: bool,
        is_exclusive: bool,
    ) -> None:
        """Read an answer of a family with these tags, forms of calls and texts that say nothing.

        Where the tools are exclusive, no others are called.
        """
        self._tags = tags
        self._forms = tuple(forms) if tools else ()
        self._opens = tuple(each for form in self._forms for each in form.opens)
        self._dropped = tuple(dropped)
        self._events = EventList()
        self._source = TextSource()
        self._block = CallBlock(self._source, CallableTools(tools, is_exclusive=is_exclusive), self._events)
        self._in_reasoning = starts_in_reasoning
        self._may_think = True
        self._was_interrupted = False
        self._drops_space = starts_in_reasoning
        self._space: list[str] = []
        # While more text of the same kind may follow: with which characters something else may begin.
        self._stops: frozenset[str] | None = None
        self._steps = self._read()

    def feed(self, text: str) -> list[OutputEvent]:
        """Return the events that became certain with this text. The first branch runs for nearly every token."""
        stops = self._stops
        if stops is not None and text and not text[-1].isspace() and stops.isdisjoint(text) and self._source.is_empty():
            return [ReasoningText(text) if self._in_reasoning else ContentText(text)]
        if text:
            self._source.append(text)
            next(self._steps, None)
        return self._events.take()

    def finish(self) -> list[OutputEvent]:
        """Return the last events when the text ends, even in the middle of a call."""
        self._source.has_ended = True
        next(self._steps, None)
        return self._events.take()

    def _read(self) -> Reading[None]:
        source = self._source
        if not self._in_reasoning:
            yield from self._read_bare_calls()
        while not (source.has_ended and source.is_empty()):
            sought = self._sought()
            is_settled = self._in_reasoning or not self._may_think
            has_text_only = is_settled and not self._space and not self._drops_space
            self._stops = sought.first_characters if has_text_only else None
            text, found = yield from source.until(sought)
            self._stops = None
            self._tell(text)
            # The text before it may have made it text too: think tags behind content are not tags.
            if found in self._sought().texts:
                yield from self._read_marker(found)
            elif found:
                self._tell(source.take(source.at + len(found)))
        self._flush_space()

    def _sought(self) -> Markers:
        tags: tuple[str, ...] = ()
        if self._tags:
            if self._in_reasoning or self._was_interrupted:
                tags += self._tags.closes
            if not self._in_reasoning and (self._may_think or self._tags.is_anywhere):
                tags += self._tags.opens
        return markers(*tags, *self._opens, *self._dropped)

    def _read_marker(self, found: str) -> Reading[None]:
        source = self._source
        source.mark()
        yield from source.accept(found)
        if found in self._opens:
            forms = [form for form in self._forms if found in form.opens]
            text = yield from self._block.read(forms, in_reasoning=self._in_reasoning)
            self._end_block(text)
            return
        source.recorded()
        if self._tags and found in (self._tags.opens if not self._in_reasoning else self._tags.closes):
            self._end_part()
            self._in_reasoning = not self._in_reasoning
            if not self._in_reasoning:
                yield from self._read_bare_calls()
        elif self._was_interrupted and self._tags and found in self._tags.closes:
            # It closes the reasoning that a call has ended already.
            self._end_part()
            self._was_interrupted = False

    def _read_bare_calls(self) -> Reading[None]:
        """Read calls that open without a marker, where the answer begins."""
        openings = tuple(each for form in self._forms for each in form.bare_opens)
        if not openings:
            return
        source = self._source
        source.mark()
        yield from source.skip_space()
        found = yield from source.accept(*openings)
        forms = [form for form in self._forms if found in form.bare_opens]
        if not forms:
            source.rewind()
            source.recorded()
            return
        self._end_block((yield from self._block.read(forms, in_reasoning=False)))

    def _end_block(self, text: str | None) -> None:
        """Go on behind calls, or tell the text that turned out to be none."""
        if text is not None:
            self._tell(text)
            return
        self._end_part()
        # A call ends reasoning that was not closed. Its close may still come, and says nothing then.
        self._was_interrupted = self._was_interrupted or self._in_reasoning
        self._in_reasoning = False

    def _tell(self, text: str) -> None:
        """Tell text, but keep white space at its end back."""
        if self._drops_space:
            text = text.lstrip()
            self._drops_space = not text
        body = text.rstrip()
        if body:
            self._flush_space()
            self._sink()(body)
            self._may_think = self._may_think and self._in_reasoning
        if len(body) < len(text):
            self._space.append(text[len(body) :])
        if not self._in_reasoning and not self._forms and not self._may_think:
            # Nothing can follow but content.
            self._flush_space()

    def _flush_space(self) -> None:
        self._sink()("".join(self._space))
        self._space.clear()

    def _sink(self) -> Callable[[str], None]:
        return self._events.reasoning if self._in_reasoning else self._events.content

    def _end_part(self) -> None:
        """Forget white space around a marker; what follows begins afresh."""
        self._space.clear()
        self._drops_space = True
        self._may_think = True
