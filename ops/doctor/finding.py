"""What an examination finds, and the page of all that was found."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial


class Level(enum.Enum):
    """How bad it is: only a problem keeps Headrace from working."""

    FINE = "ok"
    UNSEEN = "--"
    WARNING = "warn"
    PROBLEM = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the page: topic, finding, without secrets, and the remedy, if any."""

    topic: str
    text: str
    remedy: str = ""
    level: Level = Level.FINE


# Headrace cannot work; it is slower or less safe; the topic could not be checked.
problem = partial(Finding, level=Level.PROBLEM)
warning = partial(Finding, level=Level.WARNING)
unseen = partial(Finding, level=Level.UNSEEN)


def page(findings: Sequence[Finding], as_given: Callable[[str], str]) -> str:
    """Return the findings as a page of text, a verdict last; `as_given` names settings in a text as its reader does."""
    width = max(len(finding.topic) for finding in findings)
    lines = []
    for finding in findings:
        text = finding.text if finding.level is Level.FINE else as_given(finding.text)
        lines.append(f"{finding.level.value:<4}  {finding.topic:<{width}}  {_printable(text)}")
        if finding.remedy:
            lines.append(f"      {'':<{width}}  -> {as_given(finding.remedy)}")
    return "\n".join([*lines, "", verdict(findings)])


def _printable(text: str) -> str:
    """Return text that forges no line and moves no cursor: workers name themselves, files name their fields."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def verdict(findings: Sequence[Finding]) -> str:
    """Return a summary of the findings, and the topics it does not cover."""
    missing = ", ".join(dict.fromkeys(finding.topic for finding in findings if finding.level is Level.UNSEEN))
    counts = Counter(finding.level for finding in findings)
    nouns = ((counts[Level.PROBLEM], "problem"), (counts[Level.WARNING], "warning"))
    told = ", ".join(f"{number} {noun}{'' if number == 1 else 's'}" for number, noun in nouns if number)
    told = told or f"Nothing is wrong{' in the parts checked' if missing else ''}"
    return f"{told}." + (f" Not found, so not checked: {missing}." if missing else "")


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 1 where there is a problem, else 0."""
    return int(any(finding.level is Level.PROBLEM for finding in findings))
