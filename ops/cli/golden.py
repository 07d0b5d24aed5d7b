"""`headrace golden`: baselines of golden prompts, what the probes of workers say, and how their answers differ."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ops.cli.golden_recording import Recorder
from ops.cli.options import SettingsGroup, settings_command
from ops.cli.running_system import OperatorAccess, find_endpoint, find_operator, only_model
from ops.golden.prompts import default_prompts, read_prompts
from ops.stack.config import DEFAULT_STATE_DIR
from ops.text_table import aligned, printable_cell
from shared.atomic_file import AtomicFile
from shared.config import setting
from shared.errors import ConfigError, HeadraceError
from shared.golden import make_key, read_key, sign

Row = dict[str, Any]
_DRIFT_HEADS = ("WORKER", "MODEL", "COMPARED WITH", "LENGTH", "FINISH", "LOGPROB", "ANSWERS", "OTHERS", "VERDICT")
_COMPARED = {"fleet": "rest of the fleet", "revision": "other revisions", "yesterday": "yesterday"}
_HEADS = ("WORKER", "MODEL", "PROBES", "FAILED", "DEVIATION", "LIMIT", "DEVICE S", "STATE")


@dataclass(frozen=True, slots=True)
class RecordConfig:
    """What to record, and where to."""

    model_name: str | None = setting(None, "Name of the model; the one that is served if not given.", alias="--model")
    output: Path | None = setting(None, "File for the baseline. Required.")
    golden_key_file: Path | None = setting(
        None, "File with the key to sign with; a new one is written there if there is none. Required."
    )
    prompts: Path | None = setting(
        None, "Prompts to record, one JSON string a line, the longest first; a set of ours if not given."
    )
    label: str = setting("", "What to call the model's revision, for people: it is told where a probe fails.")
    url: str | None = setting(None, "Where the system runs; found through the state directory if not given.")
    api_key: str | None = setting(None, "API key; that of the state directory if not given.", secret=True)
    state_dir: Path = setting(DEFAULT_STATE_DIR, "State directory of a running `headrace up`.")


@dataclass(frozen=True, slots=True)
class CheckConfig(OperatorAccess):
    """How to print."""

    json: bool = setting(False, "One JSON object a line.")


def record(config: RecordConfig) -> int:
    """Record what a model that is known to be right makes of golden prompts.

    Workers with --golden FILE and --golden-key-file compare themselves with it. The file names the model and no
    weights, so that other weights under its name are found. Record once for each model, from the numbers that it is to
    be served in, and again when you replace it.
    """
    for name in ("output", "golden_key_file"):
        if getattr(config, name) is None:
            raise ConfigError(f"HEADRACE_{name.upper()}", "is required; see headrace golden record --help")
    assert config.output is not None
    assert config.golden_key_file is not None
    if len(config.label) > 256:
        raise ConfigError("HEADRACE_LABEL", f"has {len(config.label)} characters; 256 are allowed")
    texts = default_prompts() if config.prompts is None else read_prompts(config.prompts)
    endpoint = find_endpoint(config.url, config.api_key, config.state_dir)
    model = config.model_name or only_model(endpoint)
    try:
        # Before anything is asked: a recording takes a while.
        key_file = config.golden_key_file
        key = read_key(key_file, "HEADRACE_GOLDEN_KEY_FILE") if key_file.exists() else make_key(key_file)
        file = AtomicFile(config.output)
    except OSError as error:
        raise HeadraceError(f"{error.filename} cannot be written: {error.strerror}") from None
    try:
        baseline = Recorder(endpoint, model).record(texts, config.label, lambda text: click.echo(text, err=True))
        file.write(sign(baseline, key))
        file.commit()
    finally:
        file.abort()
    tokens = sum(len(prompt.token_ids) for prompt in baseline.prompts)
    click.echo(f"{config.output}: {len(baseline.prompts)} prompts of {model}, {tokens} tokens")
    return 0


def check(config: CheckConfig) -> int:
    """Show what the golden probes of each worker have found.

    The exit status is 1 where one fails, and where no worker has been probed, which proves nothing.

    Needs the operator's key.
    """
    rows = [
        {"worker": each["worker"], "model": each["model"], **(each.get("golden") or {})}
        for each in find_operator(config).call("GET", "/console/api/now")["workers"]
    ]
    _print(config, rows, _HEADS, _cells)
    for row in () if config.json else rows:
        if problem := row.get("problem"):
            print(f"{printable_cell(row['worker'])}: {problem if problem.isprintable() else json.dumps(problem)}")
    if not any(row.get("probes") for row in rows):
        print("headrace: no worker has been probed yet: nothing is proved", file=sys.stderr)
        return 1
    return 1 if any(row.get("in_a_row") or row.get("has_withdrawn") for row in rows) else 0


def drift(config: CheckConfig) -> int:
    """Show how the answers of each worker differ from those of others today; the exit status is 1 where one does.

    Compared are lengths, finish reasons and mean log probabilities (of answers that asked for them): with the rest of
    the fleet of the same model and revision, with its other revisions, and with yesterday (UTC), by the population
    stability index less what chance explains. Above 0.25 they differ. The exit status tells of the rest of the fleet
    alone, which has the same requests. Needs the operator's key.
    """
    rows = find_operator(config).call("GET", "/console/api/drift")["workers"]
    if rows or config.json:
        _print(config, rows, _DRIFT_HEADS, _drift_cells)
    else:
        print("nothing to compare yet: it takes answers of two workers, of two revisions, or of two days")
    return 1 if any(row["verdict"] == "differs" and row["compared_with"] == "fleet" for row in rows) else 0


def _print(config: CheckConfig, rows: list[Row], heads: Sequence[str], cells: Callable[[Row], tuple[str, ...]]) -> None:
    for line in map(json.dumps, rows) if config.json else aligned([heads, *map(cells, rows)]):
        print(line)


def _drift_cells(row: dict[str, Any]) -> tuple[str, ...]:
    names = (printable_cell(row["worker"]), printable_cell(row["model"]), _COMPARED[row["compared_with"]])
    values = ("" if value is None else f"{value:.3f}" for value in row["psi"].values())
    return (*names, *values, str(row["answers"]), str(row["others"]), row["verdict"])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    names = (printable_cell(row["worker"]), printable_cell(row["model"]))
    if "probes" not in row:
        return (*names, "", "", "", "", "", "no baseline")
    numbers = (str(row["probes"]), str(row["failed"]), f"{row['deviation']:.4f}", f"{row['limit']:.4f}")
    state = "withdrawn" if row["has_withdrawn"] else "failing" if row["in_a_row"] else "right" if row["probes"] else ""
    return (*names, *numbers, f"{row['device_s']:.2f}", state or "not probed yet")


command = SettingsGroup(
    "golden",
    help="Prove that answers are still the model's.",
    commands=[
        settings_command(RecordConfig, "record", record),
        settings_command(CheckConfig, "check", check),
        settings_command(CheckConfig, "drift", drift),
    ],
)
