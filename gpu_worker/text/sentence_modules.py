"""What a model's files for sentence-transformers say: its modules, and how the scores of a reranker are made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_worker.text.model_directory import read_json

_RERANKER = "CrossEncoder"
# Files of the first module; older models have them under other names than BERT's.
_TRANSFORMER_FILES = "sentence_*_config.json"


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """The modules of sentence-transformers, in order.

    Attributes:
        modules: The class of each, and the folder with its configuration.
    """

    modules: tuple[tuple[str, Path], ...]

    @classmethod
    def read(cls, directory: Path) -> SentenceModules | None:
        """Read `modules.json`; None where there is none.

        Raises:
            ConfigError: The file is not usable.
        """
        entries = read_json(directory / "modules.json", kind=list)
        if not entries:
            return None
        # A folder of the model's own, whatever the file says.
        folders = [(class_name(entry.get("type")), _folder(entry.get("path", ""))) for entry in entries]
        return cls(tuple((name, directory / folder) for name, folder in folders))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the classes, in order."""
        return tuple(name for name, _ in self.modules)

    def max_tokens(self) -> int | None:
        """Return how many tokens of a text the model reads; None where its files leave it to the tokenizer's.

        Raises:
            ConfigError: A file is not usable.
        """
        for folder in self.folders("Transformer")[:1]:
            for file in sorted(folder.glob(_TRANSFORMER_FILES)):
                limit = read_json(file).get("max_seq_length")
                if type(limit) is int and limit > 0:
                    return limit
        return None

    def folders(self, name: str) -> list[Path]:
        """Return the folders of the modules of this class, in order."""
        return [folder for given, folder in self.modules if given == name]

    def config(self, name: str) -> dict[str, Any]:
        """Return the configuration of the last module of this class."""
        return read_json(self.folders(name)[-1] / "config.json")


@dataclass(frozen=True, slots=True)
class RerankerSettings:
    """What becomes of a reranker's number, and what it is told without an instruction of the request.

    Attributes:
        activation: Name of the function that makes the score, in small letters.
        instruction: What the model calls its default prompt; None where it has none.
    """

    activation: str
    instruction: str | None = None

    @classmethod
    def read(cls, directory: Path, config: dict[str, Any]) -> RerankerSettings:
        """Read `config_sentence_transformers.json`, or the older fields of `config.json`; the default is the sigmoid.

        Raises:
            ConfigError: A file is not usable.
        """
        settings = read_json(directory / "config_sentence_transformers.json")
        if settings.get("model_type", _RERANKER) != _RERANKER:
            # Those of a model that makes vectors: its prompts are for these.
            settings = {}
        older = config.get("sentence_transformers")
        named = settings.get("activation_fn")
        named = named or (older.get("activation_fn") if isinstance(older, dict) else None)
        named = named or config.get("sbert_ce_default_activation_function") or "Sigmoid"
        prompts = settings.get("prompts")
        prompt = prompts.get(str(settings.get("default_prompt_name"))) if isinstance(prompts, dict) else None
        return cls(class_name(named).lower(), prompt if isinstance(prompt, str) and prompt else None)


def read_prompts(directory: Path) -> dict[str, str]:
    """Return what a model that makes vectors reads before texts, by what they are for.

    Raises:
        ConfigError: The file is not usable.
    """
    prompts = read_json(directory / "config_sentence_transformers.json").get("prompts")
    named = prompts.items() if isinstance(prompts, dict) else ()
    return {str(name): prompt for name, prompt in named if isinstance(prompt, str)}


def class_name(path: object) -> str:
    """Return the last part of a dotted name."""
    return str(path).rsplit(".", 1)[-1]


def _folder(path: object) -> str:
    name = Path(str(path)).name
    return "" if name == ".." else name
