"""What `adapter_config.json` says of an adapter, as PEFT writes it; and names, such as those of `--lora-modules`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gpu_worker.models.json_file import JsonFile
from shared.adapter_calls import MAX_ADAPTERS, is_digest
from shared.adapter_files import CONFIG_NAME
from shared.errors import ConfigError, HeadraceError

Value = TypeVar("Value", int, float)

MAX_RANK = 256
_MAX_PATTERNS = 10_000
# A third of a microsecond each; ranks are compared twice.
_MAX_COMPARED = 2_000_000
_MAX_ALPHA = 1e9
# A name whose dots may be escaped, anchored or not, or behind any module: its length is fixed, so it matches quickly.
_NAME = re.compile(r"(\^?)(\.\*\\\.)?((?:\w|\\?\.){1,256})\$?")
# Fields that, unless they have one of these values, change what an adapter computes in ways that are not served.
_PLAIN = {
    "use_dora": (False, "DoRA, whose magnitudes need the norms of the model's own weights"),
    "use_qalora": (False, "QALoRA, which pools inputs"),
    "lora_bias": (False, "biases of the adapter's own matrices"),
    "bias": ("none", "biases that were trained with it"),
    "layer_replication": (None, "layers that are there several times"),
    "alora_invocation_tokens": (None, "an adapter that begins at a token"),
    "arrow_config": (None, "a mixture of adapters"),
    "use_bdlora": (None, "BD-LoRA, whose matrices are the blocks of a diagonal"),
    "monteclora_config": (None, "MonteCLoRA, whose matrices are drawn"),
    "modules_to_save": (None, "whole modules that replace the model's"),
    "trainable_token_indices": (None, "tokens that were trained whole"),
    "kasa_config": (None, "KaSA, which takes a part of the model's own weights away"),
    "megatron_config": (None, "layers of Megatron"),
}
# Such an adapter belongs to weights that were changed when it was made, unless it was converted when it was saved.
_CHANGED_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")


class AdapterError(HeadraceError):
    """An adapter cannot be served: it is broken, of a kind that is not served, or made for another model."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """How the product of an adapter's matrices is scaled; rsLoRA divides by the root of the rank.

    `ranks` and `alphas` are of the first pattern that matches a name, `rank` and `alpha` of names that none matches;
    `parameters` are `target_parameters`, which patterns know by their own names and not by those of modules.

    Source: Kalajdzievski, rsLoRA, arXiv 2312.03732, section 3.
    """

    rank: int
    alpha: float
    ranks: Mapping[NamePattern, int]
    alphas: Mapping[NamePattern, float]
    is_rank_stabilized: bool
    parameters: frozenset[str] = frozenset()

    def check_patterns(self, num_modules: int) -> None:
        """Raise `AdapterError` if comparing all patterns with `num_modules` names would take too long."""
        num_patterns = len(self.ranks) + len(self.alphas)
        if num_patterns * num_modules > _MAX_COMPARED:
            problem = (
                f"has {num_patterns} patterns for {num_modules} modules; at most {_MAX_COMPARED} pairs are compared"
            )
            raise AdapterError(f"{CONFIG_NAME} {problem}")

    def rank_of(self, module: str) -> int:
        """Return the rank that the matrices of a module, or of a parameter, are to have."""
        return self._matching(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return what the product of a module's matrices, or a parameter's, is multiplied by."""
        rank = self.rank_of(module)
        return self._matching(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def stack_name(self, module: str, parameters: Sequence[str]) -> str:
        """Return the name that patterns know a stack of experts by, whose parameter has one of these names.

        Raises:
            AdapterError: There are patterns, and `target_parameters` does not say which one it is.
        """
        leaves = {parameter.rpartition(".")[2] for parameter in self.parameters}
        found = [parameter for parameter in parameters if parameter in leaves]
        if len(found) != 1 and (self.ranks or self.alphas):
            problem = f"has to name one of {', '.join(parameters)}: rank_pattern or alpha_pattern may be of it"
            raise AdapterError(f"{CONFIG_NAME}: target_parameters {problem}")
        return f"{module}.{found[0] if found else parameters[0]}"

    def is_target(self, parameter: str) -> bool:
        """Return whether `target_parameters` names a parameter, whole or by the end of its name."""
        parts = parameter.split(".")
        return any(".".join(parts[start:]) in self.parameters for start in range(len(parts)))

    def _matching(self, patterns: Mapping[NamePattern, Value], name: str, default: Value) -> Value:
        if patterns and self.is_target(f"{name}.weight"):
            name = f"{name}.weight"
        return next((value for pattern, value in patterns.items() if pattern.matches(name)), default)


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A key of `rank_pattern` or `alpha_pattern`: a regular expression of a whole name or its end, after a dot.

    Attributes:
        name: Matches as many characters as `length`.
        is_whole: Nothing may stand before it.
        is_behind: Something has to.
    """

    name: re.Pattern[str]
    length: int
    is_whole: bool
    is_behind: bool

    def matches(self, name: str) -> bool:
        """Return whether PEFT would take this pattern for a module, or a parameter."""
        before, end = name[: -self.length], name[-self.length :]
        is_placed = not self.is_whole and before.endswith(".") if before else not self.is_behind
        return is_placed and self.name.fullmatch(end) is not None


def read_config(directory: Path) -> AdapterConfig:
    """Read the configuration in a directory; `AdapterError` or `CheckpointError` if it is not served or malformed."""
    file = JsonFile.read(directory / CONFIG_NAME)
    kind = file.text("peft_type")
    if kind != "LORA":
        raise AdapterError(f"{CONFIG_NAME} says peft_type {kind[:40]!r}; only LORA is served")
    for name, (plain, what) in _PLAIN.items():
        value = file.fields.get(name)
        if value not in (None, plain, [], {}):
            raise AdapterError(f"{CONFIG_NAME} has {name} {str(value)[:40]!r}: {what}; this is not served")
    initial = file.fields.get("init_lora_weights")
    if isinstance(initial, str) and initial.lower().startswith(_CHANGED_WEIGHTS):
        problem = "it belongs to weights that were changed when it was made; save it converted, with"
        how = "path_initial_model_for_weight_conversion"
        raise AdapterError(f"{CONFIG_NAME} has init_lora_weights {initial[:40]!r}: {problem} {how}")
    rank = file.integer("r", maximum=MAX_RANK)
    parameters = file.texts("target_parameters")
    if len(parameters) > _MAX_PATTERNS:
        raise file.error("target_parameters", f"has {len(parameters)} names; at most {_MAX_PATTERNS} are read")
    alpha = file.number("lora_alpha", 8.0)
    if alpha > _MAX_ALPHA:
        raise file.error("lora_alpha", f"is {alpha:g}; it must be {_MAX_ALPHA:.0f} at most")
    ranks, alphas = (_patterns(file, name) for name in ("rank_pattern", "alpha_pattern"))
    for pattern, own in ranks.items():
        if not (isinstance(own, int) and 1 <= own <= MAX_RANK):
            of = pattern.name.pattern
            raise file.error(
                "rank_pattern", f"has {own} for {of[:60]!r}; a rank is a whole number from 1 to {MAX_RANK}"
            )
    return AdapterConfig(
        rank,
        alpha,
        {pattern: int(own) for pattern, own in ranks.items()},
        alphas,
        file.boolean("use_rslora", False),
        frozenset(parameters),
    )


def _patterns(file: JsonFile, name: str) -> dict[NamePattern, float]:
    """Read numbers by patterns of names; PEFT's are any regular expressions, of which only names are taken."""
    nested = file.nested(name)
    if nested is None:
        return {}
    if len(nested.fields) > _MAX_PATTERNS:
        raise file.error(name, f"has {len(nested.fields)} patterns; at most {_MAX_PATTERNS} are read")
    found: dict[NamePattern, float] = {}
    for pattern, value in nested.fields.items():
        match = _NAME.fullmatch(pattern)
        if match is None:
            raise file.error(name, f"has the pattern {pattern[:60]!r}; only names of modules are read, or their ends")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MAX_ALPHA:
            wanted = f"it must be a number above 0, {_MAX_ALPHA:.0f} at most"
            raise file.error(name, f"has {str(value)[:40]!r} for {pattern[:60]!r}; {wanted}")
        start, behind, own = match.groups()
        is_behind, length = behind is not None, len(own.replace("\\", ""))
        key = NamePattern(re.compile(own), length, bool(start) and not is_behind, is_behind)
        found.setdefault(key, value)
    return found


VARIABLE = "HEADRACE_LORA_MODULES"
_MAX_NAME = 128


def parse_modules(text: str) -> dict[str, Path]:
    """Read `name=directory`, several by commas or white space; `ConfigError` if malformed or a name is repeated."""
    modules: dict[str, Path] = {}
    for item in re.split(r"[,\s]+", text.strip(", \t\n")):
        name, separator, directory = item.partition("=")
        if not (name and separator and directory):
            raise ConfigError(VARIABLE, f"has {item[:80]!r}; each adapter is name=directory")
        try:
            check_name(name)
        except AdapterError as error:
            raise ConfigError(VARIABLE, str(error)) from None
        if name in modules:
            raise ConfigError(VARIABLE, f"has {name!r} twice")
        modules[name] = Path(directory)
    if len(modules) > MAX_ADAPTERS:
        raise ConfigError(VARIABLE, f"has {len(modules)} adapters; at most {MAX_ADAPTERS} are served")
    return modules


def check_name(name: str) -> None:
    """Refuse names that are too long or read as a digest does, with `AdapterError`."""
    if not 1 <= len(name) <= _MAX_NAME or is_digest(name):
        problem = f"has 1 to {_MAX_NAME} characters and is not a digest"
        raise AdapterError(f"an adapter cannot have the name {name[:80]!r}; one {problem}")
