"""Reads an answer as it streams: which text is content, which is reasoning, and which is a call."""

from __future__ import annotations

from collections.abc import Sequence

from shared.formats.call_reading import CallableTools, CallReading
from shared.formats.description import CallForm, ThinkTags
from shared.formats.events import ContentText, EventList, OutputEvent, ReasoningText
from shared.formats.text_source import Markers, Reading, TextSource, markers
from shared.formats.tools import Tool

# What models write too much of behind arguments.
_SURPLUS = " \t\n\r}])\"',;"


class CallBlock:
    """Reads blocks of one answer. It keeps nothing between blocks.

    Attributes:
        may_be_call: A block is read behind a marker outside of reasoning, and may still become a call.
        drops_beginnings: Such a block is left out where the text ends: a limit has cut it off.
    """

    def __init__(self, source: TextSource, tools: CallableTools, events: EventList) -> None:
        self._source = source
        self._tools = tools
        self._offered = CallableTools(tools.offered, is_exclusive=True)
        self._events = events
        self.may_be_call = self.drops_beginnings = False

    def read(self, forms: Sequence[CallForm], *, in_reasoning: bool, has_marker: bool = True) -> Reading[str | None]:
        """Read the block whose opening has just been read and recorded.

        Args:
            forms: Those that open so.
            in_reasoning: It stands in reasoning, which a call would end. A thought may be about a tool that there is
                not: then only offered tools are called.
            has_marker: The opening is no text that content may begin with as well.

        Returns:
            None after calls, or one that was cut off; the text read where there is no call: it is ordinary text.
        """
        source = self._source
        opening = source.recorded()
        source.mark()
        self.may_be_call = has_marker and not in_reasoning
        for form in forms:
            yield from source.skip_space()
            tools = self._offered if in_reasoning else self._tools
            if (yield from source.accept_spaced(form.begin)) and (yield from self._read_call(form, tools)):
                source.recorded()
                self.may_be_call = False
                yield from self._read_rest(form)
                return None
            source.rewind()
        source.recorded()
        self.may_be_call = False
        if self.drops_beginnings:
            self._drop_rest()
            return None
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


class FormatReader:
    """Owns the state of one answer.

    White space is emitted only when text of the same part follows: between reasoning, content and calls it is
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

    def finish(self, *, is_cut: bool = False) -> list[OutputEvent]:
        """Return the last events when the text ends, even in the middle of a call; `is_cut` as in `OutputReader`."""
        self._block.drops_beginnings = is_cut and self._block.may_be_call
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
        self._end_block((yield from self._block.read(forms, in_reasoning=False, has_marker=False)))

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
            self._add(body)
            self._may_think = self._may_think and self._in_reasoning
        if len(body) < len(text):
            self._space.append(text[len(body) :])
        if not self._in_reasoning and not self._forms and not self._may_think:
            # Nothing can follow but content.
            self._flush_space()

    def _flush_space(self) -> None:
        self._add("".join(self._space))
        self._space.clear()

    def _add(self, text: str) -> None:
        self._events.add(ReasoningText if self._in_reasoning else ContentText, text)

    def _end_part(self) -> None:
        """Forget white space around a marker; what follows begins afresh."""
        self._space.clear()
        self._drops_space = True
        self._may_think = True
