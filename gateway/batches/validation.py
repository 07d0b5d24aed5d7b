"""Checks every line of an input file before any is computed, as the endpoints check their bodies."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

from gateway.api.large_bodies import LargeBodies
from gateway.batches.input_lines import InputLine, input_lines, line_fields
from gateway.batches.line import read_openai_line
from gateway.batches.record import BatchError, BatchRecord
from gateway.files.catalog import FileCatalog
from gateway.files.objects import FileRecord
from gateway.fleet.fleet import Fleet
from gateway.generation import Generation
from shared.bounds import MAX_JOB_PRIORITY
from shared.errors import BadRequestError, InvalidNameError
from shared.subjects import check_name

MAX_LINES = 50_000
# Blank ones among them: they cost time too.
MAX_LINE_BREAKS = 200_000
# Reported errors at most; a file with more wrong lines usually repeats one mistake.
MAX_ERRORS = 100
# A line takes up to 50 ms, and others' large bodies wait for their turn meanwhile.
_LINES_A_TURN = 16


@dataclass(slots=True)
class InputCheck:
    """Checks the file of one batch.

    Attributes:
        fleet: While it serves any model, lines for models or adapters that no worker serves are refused.
        settled: Replaces an alias by its model.
        num_lines: Non-blank lines so far.
        errors: The first `MAX_ERRORS` errors.
    """

    record: BatchRecord
    max_line_bytes: int
    fleet: Fleet
    watermark: str | None = None
    settled: Callable[[Generation], Generation] = lambda generation: generation
    num_lines: int = 0
    errors: list[BatchError] = field(default_factory=list)
    _ids: dict[bytes, int] = field(default_factory=dict)

    async def run(self, catalog: FileCatalog, file: FileRecord, bodies: LargeBodies) -> None:
        """Read the file until it is certain that it is refused; raise `StoreError` if it cannot be read."""
        digest, num_breaks = hashlib.sha256(), 0

        def count(chunk: bytes) -> None:
            nonlocal num_breaks
            digest.update(chunk)
            num_breaks += chunk.count(b"\n")
            if num_breaks > MAX_LINE_BREAKS:
                message = f"A file has at most {MAX_LINE_BREAKS} line breaks, and a batch at most {MAX_LINES} lines."
                raise BadRequestError(message, None, "too_many_lines")

        groups = input_lines(partial(catalog.read, file), self.max_line_bytes, on_chunk=count)
        async with aclosing(groups):
            try:
                async for group in groups:
                    for start in range(0, len(group), _LINES_A_TURN):
                        check = partial(self.check, group[start : start + _LINES_A_TURN])
                        await bodies.in_thread(self.record.tenant, check)
                        if self._is_refused:
                            return
            except BadRequestError as error:
                self.errors.append(BatchError(error.code, str(error)))
                return
        if digest.hexdigest() != file.sha256:
            self.errors = [BatchError("damaged_file", "The file in the store differs from the uploaded one.")]
        elif not self.num_lines:
            self.errors = [BatchError("empty_file", "The input file has no lines.", "input_file_id")]

    @property
    def _is_refused(self) -> bool:
        return self.num_lines > MAX_LINES or len(self.errors) >= MAX_ERRORS

    def check(self, group: list[InputLine]) -> None:
        """Check some lines."""
        for line in group:
            self.num_lines += 1
            try:
                if self.num_lines > MAX_LINES:
                    raise BadRequestError(f"A batch has at most {MAX_LINES} lines.", None, "too_many_lines")
                self._check(line)
            except BadRequestError as error:
                self.errors.append(BatchError(error.code, str(error), error.param, line.number))
                if self._is_refused:
                    return

    def _check(self, line: InputLine) -> None:
        record, fields = self.record, line_fields(line, self.max_line_bytes)
        url = fields.get("url")
        if url is None:
            raise BadRequestError("Missing required parameter: 'url'.", "url", "missing_required_parameter")
        if url != record.endpoint:
            message = (
                "The URL provided for this request does not match the batch endpoint. URL provided: "
                f"'{str(url)[:128]}'. It should match the batch API endpoint: '{record.endpoint}'."
            )
            raise BadRequestError(message, "url", "invalid_url")
        parsed = read_openai_line(fields, record.tenant, record.id, watermark=self.watermark, settled=self.settled)
        digest = hashlib.blake2b(parsed.custom_id.encode("utf-8", "replace"), digest_size=16).digest()
        first = self._ids.setdefault(digest, line.number)
        if first != line.number:
            message = f"The custom_id {parsed.custom_id[:128]!r} is that of line {first} too. Each line needs its own."
            raise BadRequestError(message, "custom_id", "duplicate_custom_id")
        self._check_model(parsed.generation.name, parsed.generation.model)
        most = MAX_JOB_PRIORITY if record.max_priority is None else min(MAX_JOB_PRIORITY, record.max_priority)
        if parsed.generation.priority > most:
            raise BadRequestError(f"'priority' of a batch may be at most {most} here.", "body.priority")

    def _check_model(self, model: str, target: str) -> None:
        try:
            check_name(model)
        except InvalidNameError as error:
            raise BadRequestError(f"model: {error}", "body.model") from None
        served, allowed = self.fleet.models(), self.record.models
        is_unknown = served and target not in served and self.fleet.find_adapter(target, self.record.tenant) is None
        if (allowed is not None and model not in allowed) or is_unknown:
            message = f"The model {model[:128]!r} does not exist or this key may not use it."
            raise BadRequestError(message, "body.model", "model_not_found")
