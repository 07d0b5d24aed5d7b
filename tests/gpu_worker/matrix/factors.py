"""What may meet in an engine with speculation: factors, their levels, and selections of their combinations."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shared.grammar import Grammar

Row = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]

# Of the tokens that the model likes. Some have no choice.
GRAMMAR = Grammar(kind="regex", source="([ -#]{1,2}%&%[(-)]{1,2})+")

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.9},
    "top_k": {"temperature": 0.8, "top_k": 6},
    "top_p": {"temperature": 0.9, "top_p": 0.85},
    "min_p": {"temperature": 0.9, "min_p": 0.05},
    "repetition_penalty": {"temperature": 0.7, "repetition_penalty": 1.4},
    "presence_penalty": {"temperature": 0.0, "presence_penalty": 0.8},
    "frequency_penalty": {"temperature": 0.8, "frequency_penalty": 0.6},
    "logit_bias": {"temperature": 0.8, "logit_bias": {3: 3.0, 60: 2.5}},
    "stop_token_ids": {"temperature": 0.8, "stop_token_ids": (2, 7)},
    "eos": {"temperature": 0.8, "ignore_eos": False},
    "grammar": {"temperature": 0.9, "grammar": GRAMMAR},
    "two tokens": {"temperature": 0.8, "max_tokens": 2},
    "up to the model's length": {"temperature": 0.8, "max_tokens": 1000},
    "everything": {
        "temperature": 0.9, "top_k": 30, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": -0.2, "logit_bias": {5: 1.5}, "stop_token_ids": (9,),
    },
}  # fmt: skip

ENGINE_FACTORS: dict[str, tuple[str, ...]] = {
    "proposer": ("ngram", "draft", "eagle", "eagle3", "chains", "hostile"), "runner": ("host", "device", "graphed"),
    "kv_cache": ("auto", "int8", "fp8"), "blocks": ("ample", "scarce"), "budget": ("large", "small"),
    "depth": ("fixed", "adaptive"),
}  # fmt: skip
REQUEST_FACTORS: dict[str, tuple[str, ...]] = {
    "sampling": tuple(SAMPLINGS),
    "n": ("1", "2"),
    "prefix": ("hit", "none"),
    "reports": ("nothing", "logprobs", "prompt_logprobs"),
    "arrival": ("fresh", "resumed"),
}
FACTORS = ENGINE_FACTORS | REQUEST_FACTORS
PLAIN = "none"
"""In place of a proposer: nothing is drafted."""


def is_in_default_run(proposer: str, runner: str) -> bool:
    """Whether two levels meet in the default run: each proposer on the host, and with graphs or without by turns."""
    place = (PLAIN, *ENGINE_FACTORS["proposer"]).index(proposer) + ENGINE_FACTORS["runner"].index(runner)
    return runner == "host" or place % 2 == 0


@dataclass(frozen=True)
class EngineCell:
    """One combination of the engine's factors."""

    proposer: str
    runner: str
    kv_cache: str
    blocks: str
    budget: str
    depth: str


@dataclass(frozen=True)
class Ask:
    """One combination of a request's factors."""

    sampling: str
    n: str
    prefix: str
    reports: str
    arrival: str


def split(row: Mapping[str, str]) -> tuple[EngineCell, Ask]:
    return (
        EngineCell(**{name: row[name] for name in ENGINE_FACTORS}),
        Ask(**{name: row[name] for name in REQUEST_FACTORS}),
    )


def whole_product(factors: Mapping[str, tuple[str, ...]]) -> Iterator[Row]:
    for levels in itertools.product(*factors.values()):
        yield dict(zip(factors, levels, strict=True))


def pairs_of(row: Mapping[str, str]) -> set[Pair]:
    """Return the pairs of levels that meet in a combination."""
    return set(itertools.combinations(row.items(), 2))


def all_pairs(factors: Mapping[str, tuple[str, ...]]) -> set[Pair]:
    return {
        ((one, level), (other, other_level))
        for one, other in itertools.combinations(factors, 2)
        for level, other_level in itertools.product(factors[one], factors[other])
    }


def covering_selection(seed: int, num_asks: int) -> list[tuple[EngineCell, list[Ask]]]:
    """Return few engines with some requests each, so that each pair of levels meets, always the same ones."""
    generator = random.Random(seed)
    missing = dict.fromkeys(sorted(all_pairs(FACTORS)))
    selection = []
    while missing:
        # The first one has levels of the factors that have the most, so that all of their pairs take their turn.
        most = max(missing, key=lambda pair: len(FACTORS[pair[0][0]]) * len(FACTORS[pair[1][0]]))
        row, asks = _grown(dict(most), missing, generator), []
        while len(asks) < num_asks and not missing.keys().isdisjoint(pairs_of(row)):
            for pair in pairs_of(row):
                missing.pop(pair, None)
            asks.append(split(row)[1])
            row = _grown({name: row[name] for name in ENGINE_FACTORS}, missing, generator)
        selection.append((split(row)[0], asks))
    return selection


def _grown(chosen: Row, missing: Mapping[Pair, None], generator: random.Random) -> Row:
    """Grow a combination from some levels, level by level by what it adds."""
    others = [name for name in FACTORS if name not in chosen]
    generator.shuffle(others)
    for name in others:
        levels = generator.sample(FACTORS[name], len(FACTORS[name]))
        chosen[name] = max(levels, key=lambda level: _num_new(chosen, (name, level), missing))
    return {name: chosen[name] for name in FACTORS}


def _num_new(chosen: Row, new: tuple[str, str], missing: Mapping[Pair, None]) -> int:
    order = list(FACTORS).index
    return sum(tuple(sorted((new, old), key=lambda level: order(level[0]))) in missing for old in chosen.items())
