"""One schema of the corpus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """A schema and its documents.

    Attributes:
        valid: Documents that match, their members in the order of the schema's properties.
        invalid: Documents that do not.
        refused: The word that a refusal of the schema names; empty where it is to be supported.
    """

    schema: Any
    valid: Sequence[Any]
    invalid: Sequence[Any]
    refused: str = ""
