"""`headrace cache`: what workers keep of their KV caches, and how often they find it again."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ops.cli.options import SettingsGroup, settings_command
from ops.cli.parts import require
from ops.cli.running_system import OperatorAccess, find_operator
from ops.text_table import print_rows, printable_cell
from shared.config import REQUIRED, setting
from shared.errors import ConfigError

if TYPE_CHECKING:
    from gpu_worker.execution.tiers.file_store import FileStore

_MOST_BYTES = 1 << 30
"""Largest size of a content; a larger file is damaged, and not read."""
_TIER = "headrace_worker_kv_tier_"
_COUNTS = ("used_bytes", "limit_bytes", "stored_bytes", "loaded_bytes", "evicted_blocks", "refused_blocks", "failures")
"""Metrics of a tier below the device."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Where the files are."""

    kv_disk_path: str = setting(REQUIRED, "Directory or bucket (s3://BUCKET/PREFIX) of the files. Required.")
    json: bool = setting(False, "One JSON object a line.")


@dataclass(frozen=True, slots=True)
class ListConfig(CacheConfig):
    """Options of `headrace cache ls`."""

    verify: bool = setting(False, "Read all files, and count those that are damaged. Workers verify what they load.")


@dataclass(frozen=True, slots=True)
class ClearConfig(CacheConfig):
    """Options of `headrace cache clear`."""

    maker: str | None = setting(None, "Only the files of this maker, as `headrace cache ls` names it.")


@dataclass(frozen=True, slots=True)
class StatsConfig(OperatorAccess):
    """Options of `headrace cache stats`."""

    json: bool = setting(False, "One JSON object a line.")


class _File(NamedTuple):
    maker: str
    group: str
    key: str
    num_bytes: int
    modified: float


def list_makers(config: ListConfig) -> int:
    """List who made files, with one line for each kind of blocks.

    A maker is a model's weights with all that decides the bits of its KV: workers of equal makers share files. The log
    of a worker names its maker.
    """
    from gpu_worker.execution.tiers.file_format import is_whole, read_facts

    kinds: dict[tuple[str, str], list[_File]] = {}
    rows: list[dict[str, Any]] = []
    with _opened(config) as store:
        for file in _files(store):
            kinds.setdefault((file.maker, file.group), []).append(file)
        firsts = {kind: _read(store, files[0].key) for kind, files in kinds.items()}
        damaged = Counter(
            kind
            for kind, files in (kinds.items() if config.verify else ())
            for file in files
            if (data := _read(store, file.key)) is not None and not is_whole(data, file.key)
        )
    for (maker, group), files in sorted(kinds.items()):
        facts = read_facts(firsts[maker, group] or b"")
        rows.append(
            {
                "maker": maker,
                "weights": "?" if facts is None else facts.weights[:16],
                "group": int(group),
                "files": len(files),
                "bytes": sum(file.num_bytes for file in files),
                "last_used": time.strftime("%FT%TZ", time.gmtime(max(file.modified for file in files))),
                **({"damaged": damaged[maker, group]} if config.verify else {}),
            }
        )
    _show(rows, f"there are no files of workers in {config.kv_disk_path}", is_json=config.json)
    return 0


def clear(config: ClearConfig) -> int:
    """Delete files. Workers that use them compute the missing blocks."""
    with _opened(config) as store:
        files = list(_files(store))
        if config.maker is not None:
            files = [file for file in files if file.maker == config.maker]
            if not files:
                problem = f"is {config.maker}, which has no files there; `headrace cache ls` names the makers that have"
                raise ConfigError("HEADRACE_MAKER", problem)
        for file in files:
            store.delete(file.key)
        for folder in {file.key.rpartition("/")[0] for file in files}:
            store.prune(folder)
    num_files, num_bytes = len(files), sum(file.num_bytes for file in files)
    if config.json:
        click.echo(json.dumps({"files": num_files, "bytes": num_bytes}))
    else:
        click.echo(f"deleted {num_files} files, {num_bytes} bytes")
    return 0


def stats(config: StatsConfig) -> int:
    """Show what each tier of running workers' KV caches holds, and how many prompt tokens were found there.

    Counts begin with the worker. Needs the operator's key.
    """
    require("gateway", "prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    with find_operator(config).open("GET", "/metrics", None, {}) as answer:
        text = answer.read().decode()
    tiers: dict[tuple[str, str], dict[str, int]] = {}
    asked: dict[str, float] = {}
    for sample in (each for family in text_string_to_metric_families(text) for each in family.samples):
        if sample.name == "vllm:prefix_cache_queries_total":
            asked[sample.labels["engine"]] = sample.value
        elif sample.name.startswith(_TIER):
            place = sample.labels["worker"], sample.labels["tier"]
            tiers.setdefault(place, {})[sample.name.removeprefix(_TIER).removesuffix("_total")] = int(sample.value)
    rows = []
    for (worker, tier), values in sorted(tiers.items(), key=lambda each: each[0][0]):
        hits = values.get("hit_tokens", 0)
        share = hits / asked[worker] if asked.get(worker) else None
        counts = {name: values.get(name) for name in _COUNTS}
        rows.append({"worker": worker, "tier": tier, "hit_tokens": hits, "hit_share": share, **counts})
    _show(rows, "no worker runs", is_json=config.json)
    return 0


def _show(rows: list[dict[str, Any]], nothing: str, *, is_json: bool) -> None:
    heads = [name.upper().replace("_", " ") for row in rows[:1] for name in row]
    print_rows(rows, heads, lambda row: list(map(_cell, row.values())), nothing, is_json=is_json)


def _cell(value: str | float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1%}" if isinstance(value, float) else printable_cell(str(value))


@contextmanager
def _opened(config: CacheConfig) -> Iterator[FileStore]:
    """Yield the store; its errors name the setting."""
    place = config.kv_disk_path
    if "://" not in place and not Path(place).is_dir():
        raise ConfigError("HEADRACE_KV_DISK_PATH", f"{place} is not a directory")
    require("worker", "numpy")
    from gpu_worker.execution.tiers.file_store import open_store

    store = open_store(place)
    try:
        yield store
    except OSError as error:
        raise ConfigError("HEADRACE_KV_DISK_PATH", f"{store.place} cannot be used: {error}") from None


def _read(store: FileStore, key: str) -> bytes | None:
    """Return a file, None where it was deleted meanwhile; b"" where it alone cannot be read."""
    from gpu_worker.execution.tiers.block_files import OF_ONE_FILE

    try:
        return store.read(key, _MOST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in OF_ONE_FILE:
            return b""
        raise


def _files(store: FileStore) -> Iterator[_File]:
    from gpu_worker.execution.tiers.file_format import KEY

    for folder in store.folders():
        for key, file in sorted(store.files(folder.name).items()):
            if (found := KEY.fullmatch(key)) is not None:
                yield _File(found[1], found[2], key, file.num_bytes, file.modified)


command = SettingsGroup(
    "cache",
    commands=[
        settings_command(ListConfig, "ls", list_makers),
        settings_command(StatsConfig, "stats", stats),
        settings_command(ClearConfig, "clear", clear),
    ],
    help="Look at KV caches and their tiers, or delete files.",
)
