"""The store of the files of batches: whether it can be written, and how much room there is."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from ops.doctor.finding import Finding, problem, warning
from shared.errors import ConfigError
from shared.objects.open import opened_store

_LITTLE_BYTES = 1 << 30


def file_findings(files: str | None, state_dir: Path) -> list[Finding]:
    """Report the store that a setting names, or that of a state directory, which may have none."""
    place = files or str(state_dir / "files")
    if files is None and not Path(place).is_dir():
        return []
    return asyncio.run(_findings(place))


async def _findings(files: str) -> list[Finding]:
    try:
        store, name = await opened_store(files, "HEADRACE_FILES")
    except ConfigError as error:
        return [problem("files", error.problem, "uploads are refused and batches wait until it can be used")]
    try:
        found = [Finding("files", f"{store.place} can be written; every gateway must have it ({name[:8]})")]
    finally:
        await store.close()
    if store.is_local and (free := shutil.disk_usage(files).free) < _LITTLE_BYTES:
        remedy = "delete files, or enlarge the disk: uploads are refused when it is full"
        found.append(warning("files", f"{store.place} has {free >> 20} MB free", remedy))
    return found
