"""What the drivers of batches work with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.api.large_bodies import LargeBodies
from gateway.api.output_reading import StructuredOutputAdmission
from gateway.api.tokenizer_client import TokenizerClient
from gateway.batches.log import BatchLog
from gateway.files.catalog import FileCatalog
from gateway.fleet.fleet import Fleet
from gateway.generation import Generation
from gateway.media.intake import ImageIntake
from shared.direct_client import DirectClient
from shared.kept_results import KeptResults
from shared.server_clock import ServerClock

# Of a message besides the line that it is made of.
_MESSAGE_MARGIN_BYTES = 32 << 10


@dataclass(frozen=True, slots=True)
class DriverServices:
    """What drivers work with. One set per process; `wake` has hosts load a model."""

    nats: DirectClient
    log: BatchLog
    catalog: FileCatalog
    kept: KeptResults
    clock: ServerClock
    bodies: LargeBodies
    images: ImageIntake
    fleet: Fleet
    watermark_of: Callable[[str, str], str | None]
    settled: Callable[[Generation, str], Generation]
    grammars: StructuredOutputAdmission
    tokenizer: TokenizerClient
    wake: Callable[[str], None]

    @property
    def max_line_bytes(self) -> int:
        """Bytes of the longest line whose jobs NATS takes."""
        return max(1024, self.nats.max_payload - _MESSAGE_MARGIN_BYTES)
