"""What a model can do with a prompt besides generating, as its own files say: make a vector of it, or score it.

Vectors are made as sentence-transformers does, by `modules.json` and the pooling's own `config.json`. A decoder
without these files gives the normalised vector of its last token. Scores come from a head of one class, or from the
logits of two tokens, and end as its files for sentence-transformers say.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gpu_worker.core.pooling import PoolingPlan, Rows
from gpu_worker.quantization.gguf.model_file import find_gguf
from gpu_worker.text.model_directory import ModelDirectory, read_json
from gpu_worker.text.sentence_modules import DenseModule, RerankerSettings, SentenceModules, read_dense, read_prompts
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.errors import BadRequestError
from shared.pooling import Task

_LAYERS, _CLASSES = "Model", "ForSequenceClassification"
# What whole models of GPT-2 are called, whose name ends as that of layers alone.
_WITH_HEAD = "LMHeadModel"
_ROWS: dict[str, Rows] = {"cls": "first", "mean": "mean", "lasttoken": "last"}
_FLAGS = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "lasttoken"}
_GGUF_ROWS: dict[int, Rows] = {1: "mean", 2: "first", 3: "last"}
# How clients of Cohere, Voyage and NVIDIA name it, and how model files do.
_INPUT_TYPES: Mapping[str, tuple[str, ...]] = {
    "query": ("query", "search_query"),
    "search_query": ("search_query", "query"),
    "document": ("document", "passage", "search_document"),
    "passage": ("passage", "document", "search_document"),
    "search_document": ("search_document", "document", "passage"),
}
_ENCODERS = ("bert", "roberta", "xlm-roberta", "modernbert", "nomic_bert", "jina_embeddings_v3", "eurobert")
_YES, _NO = "yes", "no"
_NO_VECTORS = "its head scores texts, and its vectors were not made to be compared"

Activation = Literal["sigmoid", "identity"]
_ACTIVATIONS: dict[str, Activation] = {"sigmoid": "sigmoid", "identity": "identity"}


@dataclass(frozen=True, slots=True)
class EmbeddingForm:
    """How vectors are made.

    Attributes:
        rows: Which tokens' hidden vectors count.
        normalizes: Vectors have length 1, unless the request says otherwise.
        is_whole: The model attends in both directions.
        dense: Applied to the pooled vector, before anything is cut or scaled.
        prompts: What the model was trained to read before a text, by what the text is for.
        default_prompt: Before a text of no given use.
        sizes: Smaller sizes that the model was trained for; empty allows any.
    """

    rows: Rows
    normalizes: bool
    size: int
    sizes: tuple[int, ...] = ()
    is_whole: bool = False
    dense: tuple[DenseModule, ...] = ()
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str = ""

    def prompt_for(self, input_type: str | None) -> str:
        """Return the words before a text of this use, if uses differ; `BadRequestError` for an unknown use."""
        if input_type is None:
            return self.default_prompt
        names = _INPUT_TYPES.get(input_type, (input_type,))
        found = next((self.prompts[name] for name in names if name in self.prompts), None)
        if found is None and self.prompts and input_type not in _INPUT_TYPES:
            known = ", ".join(sorted({*self.prompts, *_INPUT_TYPES}))
            raise BadRequestError(f"'input_type' is {input_type!r}; this model knows {known}.", "input_type")
        return found or ""

    @property
    def plan(self) -> PoolingPlan:
        """What the engine computes."""
        return PoolingPlan(self.rows, is_whole=self.is_whole)

    def check_dimensions(self, dimensions: int | None) -> None:
        """Refuse a size that vectors cannot be cut to; `BadRequestError` names the allowed ones."""
        if dimensions is None or dimensions == self.size:
            return
        if dimensions > self.size or (self.sizes and dimensions not in self.sizes):
            allowed = f"{', '.join(map(str, self.sizes))} or {self.size}" if self.sizes else f"1 to {self.size}"
            message = f"'dimensions' is {dimensions}; this model's vectors can have {allowed}."
            raise BadRequestError(message, "dimensions")


@dataclass(frozen=True, slots=True)
class ScoreForm:
    """How a text's score is made.

    Attributes:
        plan: What the engine computes: the logit of the one class, of the token for yes, or of those for no and yes.
        activation: What makes the score of the logit, or of the difference of the two.
        instruction: The model's own, for a request without one.
    """

    plan: PoolingPlan
    activation: Activation
    instruction: str | None = None


@dataclass(frozen=True, slots=True)
class Unserved:
    """Why a model cannot do something; a sentence for the client."""

    reason: str


@dataclass(frozen=True, slots=True)
class ModelTasks:
    """What a model can do, with texts or pairs of at most `max_tokens`; None is as many as the context holds."""

    generates: bool
    embedding: EmbeddingForm | Unserved
    score: ScoreForm | Unserved
    max_tokens: int | None = None

    @property
    def score_form(self) -> ScoreForm | None:
        """Return how scores are made, None when they are not."""
        return self.score if isinstance(self.score, ScoreForm) else None

    @property
    def unserved(self) -> dict[Task, str]:
        """Return why the model cannot do what it cannot, besides generating."""
        forms: dict[Task, EmbeddingForm | ScoreForm | Unserved] = {"embed": self.embedding, "score": self.score}
        return {task: form.reason for task, form in forms.items() if isinstance(form, Unserved)}

    @property
    def names(self) -> tuple[Task, ...]:
        """Return the names under which heartbeats tell them."""
        tasks: list[Task] = ["generate"] if self.generates else []
        if isinstance(self.embedding, EmbeddingForm):
            tasks.append("embed")
        if isinstance(self.score, ScoreForm):
            tasks.append("score")
        return tuple(tasks)


def read_model_tasks(directory: ModelDirectory, tokenizer: ModelTokenizer) -> ModelTasks:
    """Read the tasks that a model can do; `ConfigError` if a file is not usable."""
    if directory.is_encoder:
        return _gguf_encoder(directory)
    if find_gguf(directory.path) is not None:
        return ModelTasks(True, _gguf_embedding(directory), _token_score(tokenizer, None, RerankerSettings("sigmoid")))
    config = read_json(directory.path / "config.json", required=True)
    architecture = str(next(iter(_listed(config, "architectures")), ""))
    modules, settings = SentenceModules.read(directory.path), RerankerSettings.read(directory.path, config)
    limit = _max_tokens(directory, config, modules)
    if architecture.endswith(_CLASSES):
        return ModelTasks(False, Unserved(_NO_VECTORS), _class_score(config, settings), limit)
    embedding = _embedding(directory, config, modules)
    if isinstance(embedding, EmbeddingForm):
        embedding = _with_prompts(embedding, directory, modules)
    if isinstance(embedding, EmbeddingForm) and modules is not None and modules.lowers_case and _has_case(tokenizer):
        embedding = Unserved("its files say do_lower_case, which is served only where the tokenizer itself does it")
    if architecture.endswith(_LAYERS) and not architecture.endswith(_WITH_HEAD):
        return ModelTasks(False, embedding, Unserved("it has no head that scores"), limit)
    if modules is not None and "LogitScore" not in modules.names:
        return ModelTasks(True, embedding, Unserved("its files say that it makes vectors"), limit)
    return ModelTasks(True, embedding, _token_score(tokenizer, modules, settings), limit)


def _max_tokens(directory: ModelDirectory, config: dict[str, Any], modules: SentenceModules | None) -> int | None:
    """Read where sentence-transformers cuts texts; without its files, an encoder's tokenizer says it."""
    limit = None if modules is None else modules.max_tokens()
    if limit is None and (modules is not None or _is_encoder(config)):
        limit = directory.tokenizer_config.get("model_max_length")
    # Tokenizers without a limit name a number beyond all contexts.
    return limit if type(limit) is int and 0 < limit < directory.max_model_len else None


def _embedding(
    directory: ModelDirectory, config: dict[str, Any], modules: SentenceModules | None
) -> EmbeddingForm | Unserved:
    sizes = tuple(size for size in _listed(config, "matryoshka_dimensions") if isinstance(size, int))
    is_encoder = _is_encoder(config)
    if modules is None:
        # As sentence-transformers takes an encoder without its files.
        default: Rows = "mean" if is_encoder else "last"
        return EmbeddingForm(default, not is_encoder, directory.hidden_size, sizes, is_encoder)
    others = [name for name in modules.names if name not in ("Transformer", "Pooling", "Dense", "Normalize")]
    if others:
        return Unserved(f"its modules.json names {others[0]}, which is not served")
    if "Pooling" not in modules.names:
        return Unserved("its modules.json names no pooling")
    modes = _pooling_modes(modules.config("Pooling"))
    rows = _ROWS.get(modes[0]) if len(modes) == 1 else None
    if rows is None:
        given = ", ".join(modes) or "none"
        return Unserved(f"its pooling is {given}; served is one of {', '.join(_ROWS)}")
    dense = _dense_modules(modules, directory.hidden_size)
    if isinstance(dense, Unserved):
        return dense
    size = len(dense[-1].weight) if dense else directory.hidden_size
    return EmbeddingForm(rows, "Normalize" in modules.names, size, sizes, is_encoder, dense)


def _with_prompts(
    form: EmbeddingForm, directory: ModelDirectory, modules: SentenceModules | None
) -> EmbeddingForm | Unserved:
    prompts, name = read_prompts(directory.path)
    # sentence-transformers refuses such a model, too; these two uses it knows by itself.
    if name is not None and name not in {*prompts, "query", "document"}:
        return Unserved(f"its default_prompt_name is {name!r}, which its prompts do not have")
    is_left_out = modules is not None and modules.config("Pooling").get("include_prompt") is False
    # The last token is never one of the prompt.
    if is_left_out and form.rows != "last" and any(prompts.values()):
        return Unserved("its pooling leaves out the tokens of its prompts (include_prompt), which is not served")
    return replace(form, prompts=prompts, default_prompt=prompts.get(name or "", ""))


def _is_encoder(config: dict[str, Any]) -> bool:
    """Whether tokens see later ones: of a kind of model that all do, or of a decoder that says it."""
    return config.get("model_type") in _ENCODERS or config.get("use_bidirectional_attention") is True


def _dense_modules(modules: SentenceModules, size: int) -> tuple[DenseModule, ...] | Unserved:
    found: list[DenseModule] = []
    folders = modules.folders("Dense")
    if folders and modules.names[2 : 2 + len(folders)] != ("Dense",) * len(folders):
        return Unserved("its modules.json has Dense elsewhere than behind its pooling")
    for folder in folders:
        module = read_dense(folder, size)
        if isinstance(module, str):
            return Unserved(module)
        found.append(module)
        size = len(module.weight)
    return tuple(found)


def _listed(config: dict[str, Any], name: str) -> list[Any]:
    value = config.get(name)
    return value if isinstance(value, list) else []


def _gguf_encoder(directory: ModelDirectory) -> ModelTasks:
    if not directory.num_classes:
        return ModelTasks(False, _gguf_embedding(directory), Unserved("its file has no head that scores"))
    score = _classes_form(directory.num_classes, RerankerSettings("sigmoid"), "first", is_encoder=True)
    return ModelTasks(False, Unserved(_NO_VECTORS), score)


def _gguf_embedding(directory: ModelDirectory) -> EmbeddingForm | Unserved:
    default: Rows = "mean" if directory.is_encoder else "last"
    rows = default if directory.pooling_type is None else _GGUF_ROWS.get(directory.pooling_type)
    if rows is None:
        return Unserved(f"its file says pooling type {directory.pooling_type}, which is not served")
    return EmbeddingForm(rows, True, directory.hidden_size, is_whole=directory.is_encoder)


def _pooling_modes(config: dict[str, Any]) -> list[str]:
    mode = config.get("pooling_mode")
    if isinstance(mode, str):
        return [mode]
    return [_FLAGS.get(name, name) for name, value in config.items() if name.startswith("pooling_mode_") and value]


def _class_score(config: dict[str, Any], settings: RerankerSettings) -> ScoreForm | Unserved:
    labels = config.get("id2label")
    num_classes = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
    is_encoder = config.get("model_type") in _ENCODERS
    rows = _ROWS.get(str(config.get("classifier_pooling", "cls"))) if is_encoder else "last"
    if rows is None:
        return Unserved(f"its head reads {config['classifier_pooling']}; served is one of {', '.join(_ROWS)}")
    return _classes_form(num_classes, settings, rows, is_encoder=is_encoder)


def _classes_form(
    num_classes: object, settings: RerankerSettings, rows: Rows, *, is_encoder: bool
) -> ScoreForm | Unserved:
    if num_classes != 1:
        return Unserved(f"its head has {num_classes} classes, and a score needs exactly one")
    return _score_form(PoolingPlan(rows, "classes", is_encoder), settings)


def _token_score(
    tokenizer: ModelTokenizer, modules: SentenceModules | None, settings: RerankerSettings
) -> ScoreForm | Unserved:
    if modules is not None:
        score = modules.config("LogitScore")
        ids = (score.get("false_token_id"), score.get("true_token_id"))
        known = tuple(token for token in ids if isinstance(token, int) and 0 <= token < tokenizer.vocab_size)
        if not isinstance(ids[1], int) or len(known) < 2 - (ids[0] is None):
            return Unserved("its LogitScore names no tokens of the model")
        return _score_form(PoolingPlan("last", known), settings)
    if not tokenizer.has_chat_template:
        return Unserved("it has no chat template to ask it by, and no head that scores")
    yes, no = (_first_token(tokenizer, word) for word in (_YES, _NO))
    if yes is None or yes == no or no is None:
        return Unserved("its answers yes and no begin with the same token")
    return _score_form(PoolingPlan("last", (no, yes)), settings)


def _score_form(plan: PoolingPlan, settings: RerankerSettings) -> ScoreForm | Unserved:
    activation = _ACTIVATIONS.get(settings.activation)
    if activation is None:
        return Unserved(f"its score ends with {settings.activation}; served are {' and '.join(_ACTIVATIONS)}")
    return ScoreForm(plan, activation, settings.instruction)


def _has_case(tokenizer: ModelTokenizer) -> bool:
    large, small = (tokenizer.encode_text(text, add_special_tokens=False) for text in ("ABC", "abc"))
    return large != small


def _first_token(tokenizer: ModelTokenizer, word: str) -> int | None:
    with contextlib.suppress(BadRequestError):
        return tokenizer.encode_text(word, add_special_tokens=False)[0]
    return None
