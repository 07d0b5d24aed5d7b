"""What a model's own files say that it can do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import transformers

from gpu_worker.core.pooling import PoolingPlan
from gpu_worker.models.families import families
from gpu_worker.models.registry import FAMILIES
from gpu_worker.text.model_tasks import EmbeddingForm, ModelTasks, ScoreForm, read_model_tasks
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.errors import BadRequestError, ConfigError
from tests.gpu_worker.models.support_page import sample_config
from tests.gpu_worker.text.conftest import CopiedModel

Tasks = Callable[..., ModelTasks]
ST = "sentence_transformers.models"


@pytest.fixture
def tasks_of(copied: CopiedModel) -> Tasks:
    """Read the tasks of the demo model with other files beside it; `config` changes fields of its `config.json`."""

    def read(files: dict[str, Any] | None = None, **config: Any) -> ModelTasks:
        copied.change("config.json", **config)
        for path, content in (files or {}).items():
            (copied.path / path).parent.mkdir(exist_ok=True)
            (copied.path / path).write_text(json.dumps(content))
        return read_model_tasks(copied.read(), copied.tokenizer())

    return read


def modules(*names: str, pooling: dict[str, Any] | None = None) -> dict[str, Any]:
    entries = [{"idx": i, "path": f"{i}_{name}" if i else "", "type": f"{ST}.{name}"} for i, name in enumerate(names)]
    return {"modules.json": entries, "1_Pooling/config.json": pooling or {}}


def test_decoder_without_files_gives_the_normalised_last_vector_and_scores_by_two_tokens(tasks_of: Tasks) -> None:
    tasks = tasks_of()
    assert tasks.names == ("generate", "embed", "score")
    assert tasks.embedding == EmbeddingForm("last", True, 256)
    # The first tokens of "no" and "yes".
    assert tasks.score == ScoreForm(PoolingPlan("last", (1063, 92)), "sigmoid")


@pytest.mark.parametrize(
    ("pooling", "rows"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "first"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}, "mean"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
@pytest.mark.parametrize("normalizes", [True, False])
def test_modules_say_how_vectors_are_made(
    tasks_of: Tasks, pooling: dict[str, Any], rows: str, normalizes: bool
) -> None:
    names = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    tasks = tasks_of(modules(*names, pooling=pooling))
    assert tasks.embedding == EmbeddingForm(rows, normalizes, 256)  # type: ignore[arg-type]
    assert tasks.names == ("generate", "embed")


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (modules("Transformer", "Pooling", "LayerNorm"), "names LayerNorm, which is not served"),
        (modules("Transformer", "Pooling", "Dense", pooling={"pooling_mode": "mean"}), "2_Dense has no model.safetens"),
        (
            modules("Transformer", "Pooling", "Normalize", "Dense", pooling={"pooling_mode": "mean"}),
            "Dense elsewhere than behind its pooling",
        ),
        (modules("Transformer"), "names no pooling"),
        (modules("Transformer", "Pooling", pooling={"pooling_mode_max_tokens": True}), "pooling is pooling_mode_max"),
        (modules("Transformer", "Pooling", pooling={"pooling_mode": "cls+mean"}), r"pooling is cls\+mean"),
        (modules("Transformer", "Pooling"), "pooling is none"),
    ],
)
def test_pooling_that_is_not_served_says_why(tasks_of: Tasks, files: dict[str, Any], reason: str) -> None:
    assert re.search(reason, tasks_of(files).unserved["embed"])


@pytest.mark.parametrize(("model_type", "name"), [("bert", "Bert"), ("xlm-roberta", "XLMRoberta")])
def test_encoder_needs_its_prompts_whole(tasks_of: Tasks, model_type: str, name: str) -> None:
    embedding = tasks_of(architectures=[f"{name}Model"], model_type=model_type).embedding
    assert embedding == EmbeddingForm("mean", False, 256, is_whole=True)
    files = modules("Transformer", "Pooling", "Normalize", pooling={"pooling_mode_cls_token": True})
    embedding = tasks_of(files, architectures=[f"{name}Model"], model_type=model_type).embedding
    assert embedding == EmbeddingForm("first", True, 256, is_whole=True)
    tasks = tasks_of(architectures=[f"{name}ForSequenceClassification"], model_type=model_type, num_labels=1)
    assert tasks.score == ScoreForm(PoolingPlan("first", "classes", is_whole=True), "sigmoid")


def encoders() -> list[str]:
    """Return the families that attend in both directions and generate nothing."""
    return [family.architecture for family in families() if sample_config(family.architecture).is_bidirectional]


def test_every_family_of_encoders_needs_its_prompts_whole(tasks_of: Tasks) -> None:
    assert len(encoders()) >= 7
    for name in encoders():
        model_type = getattr(transformers, f"{name.removesuffix('Model')}Config").model_type
        embedding = tasks_of(architectures=[name], model_type=model_type).embedding
        assert isinstance(embedding, EmbeddingForm)
        assert embedding.is_whole, f"{model_type} is missing among the encoders of model_tasks.py"


def test_every_family_of_decoders_generates(copied: CopiedModel, tokenizer: ModelTokenizer) -> None:
    decoders = sorted(FAMILIES.keys() - set(encoders()))
    assert "GPT2LMHeadModel" in decoders
    for name in decoders:
        copied.change("config.json", architectures=[name])
        assert read_model_tasks(copied.read(), tokenizer).generates, name


def test_layers_alone_only_make_vectors(tasks_of: Tasks) -> None:
    assert tasks_of(architectures=["Qwen3Model"]).names == ("embed",)
    files = modules("Transformer", "Pooling", pooling={"pooling_mode": "mean"})
    assert tasks_of(files, architectures=["Qwen3Model"]).names == ("embed",)


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"id2label": {"0": "relevant"}}, "sigmoid"),
        ({"num_labels": 1}, "sigmoid"),
        ({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "identity"),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "identity"),
    ],
)
def test_head_of_one_class_only_scores(tasks_of: Tasks, config: dict[str, Any], activation: str) -> None:
    tasks = tasks_of(architectures=["LlamaForSequenceClassification"], **config)
    assert tasks.names == ("score",)
    assert tasks.score == ScoreForm(PoolingPlan("last", "classes"), activation)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "activation", "instruction"),
    [
        ({"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.activation.Sigmoid"}, "sigmoid", None),
        ({"prompts": {"q": "Find it"}, "default_prompt_name": "q"}, "identity", "Find it"),
        ({"prompts": {"q": "Find it"}, "default_prompt_name": None}, "identity", None),
        # Those of a model that makes vectors.
        (
            {"model_type": "SentenceTransformer", "prompts": {"q": "Find it"}, "default_prompt_name": "q"},
            "identity",
            None,
        ),
    ],
)
def test_settings_of_a_reranker_go_before_older_ones(
    tasks_of: Tasks, settings: dict[str, Any], activation: str, instruction: str | None
) -> None:
    older = {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}
    tasks = tasks_of({"config_sentence_transformers.json": settings}, **older)
    assert tasks.score_form is not None
    assert (tasks.score_form.activation, tasks.score_form.instruction) == (activation, instruction)


@pytest.mark.parametrize(
    "config",
    [{}, {"id2label": {"0": "a", "1": "b"}}, {"num_labels": 1, "sentence_transformers": {"activation_fn": "x.Tanh"}}],
)
def test_head_that_gives_no_single_score_is_not_served(tasks_of: Tasks, config: dict[str, Any]) -> None:
    assert tasks_of(architectures=["LlamaForSequenceClassification"], **config).names == ()


@pytest.mark.parametrize(
    ("score", "tokens"),
    [
        ({"true_token_id": 7, "false_token_id": 3}, (3, 7)),
        ({"true_token_id": 7, "false_token_id": None}, (7,)),
        ({"true_token_id": 7, "false_token_id": 4096}, None),
        ({}, None),
    ],
)
def test_logit_score_names_the_tokens(tasks_of: Tasks, score: dict[str, Any], tokens: tuple[int, ...] | None) -> None:
    files = modules("Transformer", "LogitScore") | {"1_LogitScore/config.json": score}
    tasks = tasks_of(files)
    assert tasks.names == (("generate", "score") if tokens else ("generate",))
    if tokens:
        assert tasks.score == ScoreForm(PoolingPlan("last", tokens), "sigmoid")


def test_file_that_is_not_what_it_should_be_is_named(tasks_of: Tasks) -> None:
    with pytest.raises(ConfigError, match=r"modules\.json is not usable"):
        tasks_of({"modules.json": {"type": "x"}})


@pytest.mark.parametrize(
    ("sizes", "dimensions", "allowed"),
    [((), 257, "1 to 256"), ((64, 128), 100, "64, 128 or 256"), ((64, 128), 300, "64, 128 or 256")],
)
def test_dimensions_that_vectors_do_not_have_are_refused(sizes: tuple[int, ...], dimensions: int, allowed: str) -> None:
    form = EmbeddingForm("last", True, 256, sizes)
    for size in (None, 256, *(sizes or (1, 255))):
        form.check_dimensions(size)
    with pytest.raises(BadRequestError, match=f"'dimensions' is {dimensions}; .* can have {allowed}") as caught:
        form.check_dimensions(dimensions)
    assert caught.value.param == "dimensions"


def test_matryoshka_sizes_are_read(tasks_of: Tasks) -> None:
    embedding = tasks_of(matryoshka_dimensions=[64, 128]).embedding
    assert isinstance(embedding, EmbeddingForm)
    assert embedding.sizes == (64, 128)


@pytest.mark.parametrize(
    "fields",
    [{"architectures": 7}, {"architectures": [[1]]}, {"architectures": []}, {"matryoshka_dimensions": 5}],
    ids=repr,
)
def test_field_of_another_type_says_nothing(tasks_of: Tasks, fields: dict[str, Any]) -> None:
    assert tasks_of(**fields).names == ("generate", "embed", "score")


def test_pooling_of_a_classifier_that_is_no_name_is_not_served(tasks_of: Tasks) -> None:
    config = {"architectures": ["BertForSequenceClassification"], "model_type": "bert", "id2label": {"0": "x"}}
    assert tasks_of(**config, classifier_pooling=["cls"]).names == ()
    settings = {"config_sentence_transformers.json": {"prompts": {"a": "b"}, "default_prompt_name": ["a"]}}
    assert tasks_of(settings).score_form == tasks_of().score_form


def test_text_gets_the_models_own_words_for_what_it_is_for(tasks_of: Tasks) -> None:
    prompts = {"query": "Find: ", "document": "", "code": "Code: "}
    form = tasks_of({"config_sentence_transformers.json": {"prompts": prompts}}).embedding
    assert isinstance(form, EmbeddingForm)
    names = ("query", "search_query", "passage", "document", "code")
    assert [form.prompt_for(name) for name in names] == ["Find: ", "Find: ", "", "", "Code: "]
    with pytest.raises(
        BadRequestError, match="'input_type' is 'clustering'; this model knows code, document, "
    ) as caught:
        form.prompt_for("clustering")
    assert caught.value.param == "input_type"


@pytest.mark.parametrize(
    ("settings", "default"),
    [
        ({"default_prompt_name": "query"}, "Find: "),
        ({"default_prompt_name": "document"}, ""),
        ({"default_prompt_name": None}, ""),
        ({"default_prompt_name": "query", "model_type": "SentenceTransformer"}, "Find: "),
        # Those of a reranker are for its scores.
        ({"default_prompt_name": "query", "model_type": "CrossEncoder"}, ""),
    ],
)
def test_text_of_no_given_use_gets_the_default_words(tasks_of: Tasks, settings: dict[str, Any], default: str) -> None:
    prompts = {"prompts": {"query": "Find: "}}
    form = tasks_of({"config_sentence_transformers.json": prompts | settings}).embedding
    assert isinstance(form, EmbeddingForm)
    assert form.prompt_for(None) == default


def test_default_words_that_are_missing_are_named(tasks_of: Tasks) -> None:
    settings = {"prompts": {"query": "Find: "}, "default_prompt_name": "code"}
    tasks = tasks_of({"config_sentence_transformers.json": settings})
    assert "default_prompt_name is 'code'" in tasks.unserved["embed"]


@pytest.mark.parametrize(
    ("prompts", "mode", "is_served"),
    [
        ({"query": "Find: "}, "mean", False),
        ({"query": "Find: "}, "cls", False),
        ({"query": "Find: "}, "lasttoken", True),
        ({"query": ""}, "mean", True),
    ],
)
def test_prompts_that_the_pooling_leaves_out_are_not_served(
    tasks_of: Tasks, prompts: dict[str, str], mode: str, is_served: bool
) -> None:
    files = modules("Transformer", "Pooling", pooling={"pooling_mode": mode, "include_prompt": False})
    tasks = tasks_of(files | {"config_sentence_transformers.json": {"prompts": prompts}})
    assert ("embed" in tasks.names) == is_served
    assert is_served or "include_prompt" in tasks.unserved["embed"]


def test_small_letters_are_served_where_the_tokenizer_makes_them(copied: CopiedModel, tasks_of: Tasks) -> None:
    files = modules("Transformer", "Pooling", pooling={"pooling_mode": "mean"})
    files["sentence_bert_config.json"] = {"do_lower_case": True}
    assert "do_lower_case" in tasks_of(files).unserved["embed"]
    copied.change("tokenizer.json", normalizer={"type": "Lowercase"})
    assert "embed" in tasks_of(files).names
    files["sentence_bert_config.json"] = {"do_lower_case": False}
    copied.change("tokenizer.json", normalizer=None)
    assert "embed" in tasks_of(files).names


def test_model_without_words_of_its_own_treats_all_texts_alike(tasks_of: Tasks) -> None:
    form = tasks_of({"config_sentence_transformers.json": {"prompts": [1]}}).embedding
    assert isinstance(form, EmbeddingForm)
    assert [form.prompt_for(name) for name in ("query", "passage", "clustering")] == ["", "", ""]


@pytest.mark.parametrize(
    ("files", "config", "expected"),
    [
        (modules("Transformer", "Pooling") | {"sentence_bert_config.json": {"max_seq_length": 24}}, {}, 24),
        (modules("Transformer", "Pooling") | {"sentence_roberta_config.json": {"max_seq_length": 24}}, {}, 24),
        (modules("Transformer", "Pooling") | {"sentence_bert_config.json": {"max_seq_length": None}}, {}, 20),
        (modules("Transformer", "Pooling") | {"sentence_bert_config.json": {"max_seq_length": True}}, {}, 20),
        (modules("Transformer", "Pooling"), {}, 20),
        (modules("Transformer", "Pooling") | {"sentence_bert_config.json": {"max_seq_length": 1 << 20}}, {}, None),
        ({"sentence_bert_config.json": {"max_seq_length": 24}}, {}, None),
        ({}, {"use_bidirectional_attention": True}, 20),
    ],
)
def test_texts_are_read_as_far_as_the_files_say(
    tasks_of: Tasks, files: dict[str, Any], config: dict[str, Any], expected: int | None
) -> None:
    assert tasks_of(files | {"tokenizer_config.json": {"model_max_length": 20}}, **config).max_tokens == expected
