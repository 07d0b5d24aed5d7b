"""JSON schemas written for these tests, each with documents that match it and documents that do not."""

from tests.shared.structured_output.corpus.arrays import ARRAYS
from tests.shared.structured_output.corpus.case import Case
from tests.shared.structured_output.corpus.combinations import COMBINATIONS
from tests.shared.structured_output.corpus.everyday import EVERYDAY
from tests.shared.structured_output.corpus.numbers import NUMBERS
from tests.shared.structured_output.corpus.objects import OBJECTS
from tests.shared.structured_output.corpus.references import REFERENCES
from tests.shared.structured_output.corpus.strings import STRINGS
from tests.shared.structured_output.corpus.values import VALUES

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
