"""`headrace golden`: baselines of golden prompts, results of the workers' probes, and differences of their answers.

A baseline is recorded by the HTTP API. The first pass has the system to itself, prompt by prompt. The others ask for
many prompts at once, so that batches have other sizes and shapes, and workers others. The largest deviation between
passes becomes part of the baseline: no probe is judged more strictly than the system agrees with itself. Where workers
disagree by more than any rounding, the recording is refused.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from ops.cli.options import SettingsGroup, settings_command
from ops.cli.running_system import (
    Endpoint,
    OperatorAccess,
    ServerRefusedError,
    find_endpoint,
    find_operator,
    only_model,
    tell,
)
from ops.golden.prompts import default_prompts, read_prompts
from ops.stack.config import DEFAULT_STATE_DIR
from ops.text_table import print_rows, printable_cell
from shared.config import REQUIRED, setting
from shared.errors import ConfigError, HeadraceError
from shared.files import AtomicFile
from shared.golden import (
    LONG_TOKENS,
    MAX_PROMPT_TOKENS,
    NUM_ANSWER_TOKENS,
    NUM_TOP,
    Baseline,
    GoldenPrompt,
    Likely,
    make_key,
    read_key,
    sign,
)
from shared.golden_statistic import MAX_NOISE, answer_deviation, place_deviation, score_deviation, spread

Row = dict[str, Any]
_DRIFT_HEADS = ("WORKER", "MODEL", "COMPARED WITH", "LENGTH", "FINISH", "LOGPROB", "ANSWERS", "OTHERS", "VERDICT")
_COMPARED = {"fleet": "rest of the fleet", "revision": "other revisions", "yesterday": "yesterday"}
_HEADS = ("WORKER", "MODEL", "PROBES", "FAILED", "DEVIATION", "LIMIT", "DEVICE S", "STATE")


@dataclass(frozen=True, slots=True)
class RecordConfig:
    """What to record, and where to."""

    output: Path = setting(REQUIRED, "File for the baseline. Required.")
    golden_key_file: Path = setting(
        REQUIRED, "File with the key to sign with; a new one is written there if there is none. Required."
    )
    model_name: str | None = setting(None, "Name of the model; the one that is served if not given.", alias="--model")
    prompts: Path | None = setting(
        None, "Prompts to record, one JSON string a line, the longest first; a set of ours if not given."
    )
    label: str = setting("", "Name of the model's revision, for people: reports of failed probes show it.")
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
    print_rows(rows, _HEADS, _cells, is_json=config.json)
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
        print_rows(rows, _DRIFT_HEADS, _drift_cells, is_json=config.json)
    else:
        print("nothing to compare yet: it takes answers of two workers, of two revisions, or of two days")
    return 1 if any(row["verdict"] == "differs" and row["compared_with"] == "fleet" for row in rows) else 0


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


MIN_TOKENS = 16
_PASSES = 2
_AT_ONCE = 8
_PATIENCE_S = 600.0
_TOKEN = "token_id:"
_PLAIN = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1, "stream": False}

Answer = tuple[tuple[Likely, ...], ...]


class UnsteadyError(HeadraceError):
    """The system's own answers differ by more than rounding explains."""


@dataclass(frozen=True, slots=True)
class Recorder:
    """Asks a system."""

    endpoint: Endpoint
    model: str
    told_until: list[float] = field(default_factory=lambda: [0.0], init=False)

    def record(self, texts: Sequence[str], label: str, told: Callable[[str], None]) -> Baseline:
        """Record a baseline of these prompts; the first long one becomes the anchor.

        Raises:
            ServerRefusedError: The system is not there or refuses.
            UnsteadyError: Its answers differ too much from each other.
        """
        salt = secrets.token_hex(8)
        prompts = []
        for number, text in enumerate(texts, 1):
            prompts.append(self._first_score(text, salt))
            told(f"{number} of {len(texts)} prompts: {len(prompts[-1].token_ids)} tokens")
        anchor = next((p for p in prompts if len(p.token_ids) >= LONG_TOKENS), None)
        anchor = anchor or max(prompts, key=lambda prompt: len(prompt.token_ids))
        prompts = [anchor, *(prompt for prompt in prompts if prompt is not anchor)]
        answer, noise, place_noise = self.answer(anchor.token_ids, salt), 0.0, 0.0
        for number in range(1, _PASSES + 1):
            found, place = self._pass_deviations(prompts, answer)
            noise, place_noise = max(noise, found), max(place_noise, place)
            told(f"pass {number} of {_PASSES}: the system differs from itself by {noise:.4f} at most")
        if noise > MAX_NOISE:
            limit = f"{noise:.3f}, more than the {MAX_NOISE:g} that rounding explains"
            remedy = "record from workers that are all known to be right"
            raise UnsteadyError(f"two passes over the same prompts differ by {limit}; {remedy}")
        return Baseline(
            model=self.model,
            label=label,
            recorded=time.time(),
            noise=noise,
            place_noise=place_noise,
            prompts=tuple(prompts),
            answer=answer,
        )

    def score(self, prompt: str | list[int], salt: str) -> GoldenPrompt:
        """Return a prompt's tokens and their log probabilities."""
        asked = {"prompt": prompt, "max_tokens": 0, "prompt_logprobs": 0, "return_token_ids": True, "cache_salt": salt}
        choice = self._ask(asked)
        token_ids, entries = choice["prompt_token_ids"], choice["prompt_logprobs"][1:]
        pairs = zip(token_ids[1:], entries, strict=True)
        return GoldenPrompt(tuple(token_ids), tuple(entry[str(token_id)]["logprob"] for token_id, entry in pairs))

    def answer(self, token_ids: Sequence[int], salt: str) -> Answer:
        """Return the most likely tokens after a prompt, best first, at each generated position."""
        asked = {"prompt": list(token_ids), "max_tokens": NUM_ANSWER_TOKENS, "logprobs": NUM_TOP, "ignore_eos": True}
        found = self._ask({**asked, "return_tokens_as_token_ids": True, "cache_salt": salt})["logprobs"]
        places = []
        for chosen, top in zip(found["tokens"], found["top_logprobs"], strict=True):
            ranked = sorted(top.items(), key=lambda entry: (entry[0] != chosen, -entry[1]))[:NUM_TOP]
            places.append(tuple((int(name.removeprefix(_TOKEN)), logprob) for name, logprob in ranked))
        return tuple(places)

    def _first_score(self, text: str, salt: str) -> GoldenPrompt:
        """Score a text, or as much of its beginning as the model's context and a baseline hold."""
        while True:
            try:
                prompt = self.score(text, salt)
                break
            except ServerRefusedError as error:
                if error.code != "context_length_exceeded" or len(text) < MIN_TOKENS:
                    raise
                text = text[: len(text) * 3 // 4]
        if len(prompt.token_ids) < MIN_TOKENS:
            shown = f"{text[:40]!r} has {len(prompt.token_ids)} tokens"
            raise HeadraceError(f"a golden prompt needs {MIN_TOKENS} tokens at least, and {shown}")
        return GoldenPrompt(prompt.token_ids[:MAX_PROMPT_TOKENS], prompt.logprobs[: MAX_PROMPT_TOKENS - 1])

    def _pass_deviations(self, prompts: Sequence[GoldenPrompt], answer: Answer) -> tuple[float, float]:
        """Return by how much prompts differ when all are asked for at once, and a single token of the anchor."""
        salt = secrets.token_hex(8)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            scored = list(pool.map(lambda prompt: self.score(list(prompt.token_ids), salt), prompts))
        found = [(likely[0][0], dict(likely)) for likely in self.answer(prompts[0].token_ids, salt)]
        # Alternatives may change their places, and then the last of them are others.
        known = [[entry for entry in likely if entry[0] in own] for likely, (_, own) in zip(answer, found, strict=True)]
        deviations = [score_deviation(a.logprobs, b.logprobs) for a, b in zip(prompts, scored, strict=True)]
        unit = spread(prompts[0].logprobs)
        places = zip(prompts[0].logprobs, scored[0].logprobs, strict=True)
        place = max(place_deviation(expected, other, unit) for expected, other in places)
        return max(*deviations, answer_deviation([own for own in known if own], found, unit)), place

    def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        asked, began = {"model": self.model, **_PLAIN, **body}, time.monotonic()
        while True:
            try:
                choice: dict[str, Any] = self.endpoint.call("POST", "/v1/completions", asked)["choices"][0]
                return choice
            except ServerRefusedError as error:
                # The same request finds the place that is kept for it.
                if error.retry_after_s is None or time.monotonic() - began > _PATIENCE_S:
                    raise
                # Prompts asked for at once are refused together: once is enough.
                if (now := time.monotonic()) >= self.told_until[0]:
                    self.told_until[0] = now + error.retry_after_s
                    tell(f"{str(error).removesuffix('.')}; waiting {error.retry_after_s:g} s to ask again")
                time.sleep(error.retry_after_s)


command = SettingsGroup(
    "golden",
    help="Prove that answers are still the model's.",
    commands=[
        settings_command(RecordConfig, "record", record),
        settings_command(CheckConfig, "check", check),
        settings_command(CheckConfig, "drift", drift),
    ],
)
