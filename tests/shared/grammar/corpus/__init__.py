"""JSON schemas written for these tests, each with documents that match it and documents that do not."""

from tests.shared.grammar.corpus.arrays import ARRAYS
from tests.shared.grammar.corpus.case import Case
from tests.shared.grammar.corpus.combinations import COMBINATIONS
from tests.shared.grammar.corpus.everyday import EVERYDAY
from tests.shared.grammar.corpus.numbers import NUMBERS
from tests.shared.grammar.corpus.objects import OBJECTS
from tests.shared.grammar.corpus.references import REFERENCES
from tests.shared.grammar.corpus.strings import STRINGS
from tests.shared.grammar.corpus.values import VALUES

CORPUS: tuple[Case, ...] = (
    *VALUES,
    *NUMBERS,
    *STRINGS,
    *ARRAYS,
    *OBJECTS,
    *COMBINATIONS,
    *REFERENCES,
    *EVERYDAY,
)

__all__ = ["CORPUS", "Case"]
