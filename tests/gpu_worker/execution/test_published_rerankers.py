"""Rerankers in their published layouts; the oracle is `transformers`, used as the model cards say.

Source: files and model cards of ms-marco-MiniLM, bge-reranker and Qwen3-Reranker, and the files that
sentence-transformers writes beside a cross encoder, before version 4.0 and since.
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from gpu_worker.consumer.answer import PooledAnswers
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.model_tasks import read_model_tasks
from gpu_worker.text.prompt_encoder import ScoredText, score_prompt
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.pooling import Pooling
from tests.gpu_worker.execution.engine_run import BLOCK, make_runner, run
from tests.gpu_worker.execution.pooled_sequences import sequence_of

WORDS = tuple(re.findall("[a-z]+", "the a moon is far away sum of two numbers which planet red known as mars"))
QUERY = "which planet is known as the red planet?"
DOCUMENTS = ("Mars, known as the red planet.", "the moon is far away", "a sum of two numbers")
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# As the model card of Qwen3-Reranker builds its prompt.
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"

_SIZES: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
_BERT: dict[str, Any] = {
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "id2label": {"0": "LABEL_0"},
    "initializer_range": 0.02,
    "label2id": {"LABEL_0": 0},
    "position_embedding_type": "absolute",
    "use_cache": True,
}
_MINILM = _BERT | {
    "architectures": ["BertForSequenceClassification"],
    "gradient_checkpointing": False,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "pad_token_id": 0,
    "type_vocab_size": 2,
}
_BGE = _BERT | {
    "architectures": ["XLMRobertaForSequenceClassification"],
    "bos_token_id": 0,
    "classifier_dropout": None,
    "eos_token_id": 2,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 514,
    "model_type": "xlm-roberta",
    "output_past": True,
    "pad_token_id": 1,
    "torch_dtype": "float32",
    "type_vocab_size": 1,
}
_QWEN3: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 16,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "use_cache": True,
    "use_sliding_window": False,
}
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Turns as in Qwen3's template: a model that is not to think gets an empty thought.
_TURNS = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif %}{%- endif %}"
)
_ROLES = (
    PREFIX + "<Instruct>: {{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first }}\n"
    "<Query>: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "<Document>: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
    + SUFFIX.replace("\n", "{{ '\\n' }}")
)


def save_minilm(directory: Path, **activation: Any) -> None:
    """Save a BERT with a head of one class and a word-piece tokenizer."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, ",", ".", "?", "##s"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(vocabulary[:5])
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.decoder = decoders.WordPiece()
    # As published: a file made for training cuts and pads.
    tokenizer.enable_truncation(512)
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("cls", "mask", "pad", "sep", "unk")}
    settings = {"do_lower_case": True, "model_max_length": 512, "tokenizer_class": "BertTokenizer", **special}
    _save_model(directory, _MINILM | {"vocab_size": len(vocabulary)} | activation)
    _save_tokenizer(directory, tokenizer, settings)
    (directory / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    weights = directory / "model.safetensors"
    save_file(load_file(weights) | {"bert.embeddings.position_ids": torch.arange(512)[None]}, weights)


def save_bge(directory: Path) -> None:
    """Save an XLM-RoBERTa with a head of one class and a unigram tokenizer."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = ["\u2581", *(mark + word for word in WORDS for mark in ("\u2581", "")), *"abcdefghijklmnopqrstuvwxyz,.?M"]
    vocabulary = [(piece, 0.0) for piece in special]
    vocabulary += [(piece, -1.0 - len(vocabulary) / 100) for piece in dict.fromkeys(pieces)]
    tokenizer = Tokenizer(models.Unigram([*vocabulary, ("<mask>", 0.0)], unk_id=3))
    tokenizer.add_special_tokens([*special, AddedToken("<mask>", lstrip=True)])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = {"bos": "<s>", "cls": "<s>", "eos": "</s>", "mask": "<mask>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>"}
    settings = {"model_max_length": 8192, "tokenizer_class": "PreTrainedTokenizerFast"}
    _save_model(directory, _BGE | {"vocab_size": len(vocabulary) + 1})
    _save_tokenizer(directory, tokenizer, settings | {f"{name}_token": token for name, token in names.items()})


def save_qwen3(directory: Path, architecture: str, template: str = _TURNS, **fields: Any) -> Tokenizer:
    """Save a Qwen3 of some architecture with a byte-level tokenizer, which is returned."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "ye", "yes", "no"]
    merges = [("y", "e"), ("ye", "s"), ("n", "o")]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end, stop = (tokenizer.token_to_id(name) for name in (_SPECIAL[0], _SPECIAL[2]))
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "bos_token_id": end, "eos_token_id": stop, "pad_token_id": end}
    _save_model(directory, {"architectures": [architecture], **_QWEN3} | sizes | fields)
    settings = {"add_bos_token": False, "eos_token": _SPECIAL[2], "pad_token": _SPECIAL[0], "model_max_length": 131072}
    _save_tokenizer(directory, tokenizer, settings | {"chat_template": template})
    return tokenizer


def save_sentence_files(directory: Path, *modules: str, activation: str, score: dict[str, Any] | None = None) -> None:
    """Save what sentence-transformers 5.4 writes beside a reranker; its template knows queries and documents."""
    entries = [
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": f"sentence_transformers.x.{name}"}
        for i, name in enumerate(modules)
    ]
    settings = {
        "__version__": {"pytorch": "2.10.0", "sentence_transformers": "5.4.0", "transformers": "5.5.0"},
        "activation_fn": f"torch.nn.modules.{activation}",
        "default_prompt_name": "query",
        "model_type": "CrossEncoder",
        "prompts": {"query": INSTRUCTION},
    }
    _write(directory / "modules.json", entries)
    _write(directory / "config_sentence_transformers.json", settings)
    (directory / "chat_template.jinja").write_text(_ROLES)
    if score is not None:
        (directory / "1_LogitScore").mkdir()
        _write(directory / "1_LogitScore" / "config.json", score)


def _save_model(directory: Path, fields: dict[str, Any]) -> None:
    """Save random weights under a configuration that has exactly these fields."""
    import transformers

    config = transformers.AutoConfig.for_model(**{**fields, **_SIZES})
    torch.manual_seed(7)
    model = getattr(transformers, fields["architectures"][0])(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Attention that tells tokens apart, and a head whose numbers are around zero.
            is_head = name.startswith("classifier")
            offset = 0.5 if parameter.dim() == 1 and not is_head else 0.0
            parameter.copy_(torch.randn_like(parameter) * (0.15 if is_head else 0.4) + offset)
    model.save_pretrained(directory)
    _write(directory / "config.json", {**fields, **_SIZES})


def _save_tokenizer(directory: Path, tokenizer: Tokenizer, settings: dict[str, Any]) -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    _write(directory / "tokenizer_config.json", settings)
    special = {name: value for name, value in settings.items() if name.endswith("_token") and isinstance(value, str)}
    _write(directory / "special_tokens_map.json", special)


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2))


SIGMOID, IDENTITY = "activation.Sigmoid", "linear.Identity"
OLD = {"sbert_ce_default_activation_function": f"torch.nn.modules.{IDENTITY}"}
NEW = {"sentence_transformers": {"activation_fn": f"torch.nn.modules.{IDENTITY}", "version": "4.1.0.dev0"}}
ONE_CLASS = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}

Pairs = list[tuple[str, str]]
PAIRS: Pairs = [(QUERY, document) for document in DOCUMENTS]


def scores(directory: Path, pairs: Pairs, instruction: str | None = None) -> list[float]:
    """Score pairs as a worker does, from the files to the number in the answer."""
    model = read_model_directory(directory)
    tokenizer = ModelTokenizer(model)
    tasks = read_model_tasks(model, tokenizer)
    form = tasks.score_form
    assert form is not None, tasks.unserved
    prompts = [score_prompt(tokenizer, form, ScoredText(*pair, instruction)) for pair in pairs]
    sequences = [sequence_of(str(number), prompt, form.plan) for number, prompt in enumerate(prompts)]
    runner = make_runner(directory, num_blocks=model.max_model_len // BLOCK)
    # In chunks, where the model allows it.
    run(runner, sequences, token_budget=512 if form.plan.is_whole else 200)
    answers = PooledAnswers(tasks)
    return [struct.unpack("<f", answers.vector(Pooling(task="score"), each))[0] for each in sequences]


def logits(directory: Path, texts: list[Any], auto: str) -> Any:
    """Return the logits of `transformers` for the last place of each text or pair, `[num_texts, num_logits]`."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = getattr(transformers, auto).from_pretrained(directory, dtype=torch.float32).eval()
    rows = []
    with torch.no_grad():
        for text in texts:
            given = tokenizer(*text if isinstance(text, tuple) else (text,), return_tensors="pt")
            found = model(**given).logits[0]
            rows.append(found if found.dim() == 1 else found[-1])
    return torch.stack(rows)


def card_prompt(query: str, document: str, instruction: str = INSTRUCTION) -> str:
    return f"{PREFIX}<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}{SUFFIX}"


def check(found: list[float], expected: Any) -> None:
    assert found == pytest.approx(expected.tolist(), abs=1e-4)
    # The oracle tells the documents apart, too.
    assert expected.max() - expected.min() > 1e-3


@pytest.mark.parametrize("activation", [OLD, NEW, {}], ids=["before-4.0", "since-4.0", "none"])
def test_minilm_cross_encoder(tmp_path: Path, activation: dict[str, Any]) -> None:
    save_minilm(tmp_path, **activation)
    logit = logits(tmp_path, PAIRS, "AutoModelForSequenceClassification")[:, 0]
    check(scores(tmp_path, PAIRS), logit if activation else logit.sigmoid())


def test_bge_reranker(tmp_path: Path) -> None:
    save_bge(tmp_path)
    check(scores(tmp_path, PAIRS), logits(tmp_path, PAIRS, "AutoModelForSequenceClassification")[:, 0].sigmoid())


@pytest.mark.parametrize("instruction", [None, "Find planets"])
def test_qwen3_reranker_with_the_template_of_its_model_card(tmp_path: Path, instruction: str | None) -> None:
    tokenizer = save_qwen3(tmp_path, "Qwen3ForCausalLM")
    prompts = [card_prompt(query, document, instruction or INSTRUCTION) for query, document in PAIRS]
    found = logits(tmp_path, prompts, "AutoModelForCausalLM")
    no, yes = (found[:, tokenizer.token_to_id(word)] for word in ("no", "yes"))
    check(scores(tmp_path, PAIRS, instruction), torch.stack([no, yes], 1).softmax(1)[:, 1])


def test_qwen3_reranker_with_the_files_of_sentence_transformers(tmp_path: Path) -> None:
    tokenizer = save_qwen3(tmp_path, "Qwen3ForCausalLM")
    no, yes = (tokenizer.token_to_id(word) for word in ("no", "yes"))
    score = {"true_token_id": yes, "false_token_id": no, "module_input_name": "causal_logits"}
    save_sentence_files(tmp_path, "Transformer", "LogitScore", activation=IDENTITY, score=score)
    found = logits(tmp_path, [card_prompt(*pair) for pair in PAIRS], "AutoModelForCausalLM")
    check(scores(tmp_path, PAIRS), found[:, yes] - found[:, no])
    found = logits(tmp_path, [card_prompt(*pair, "Find planets") for pair in PAIRS], "AutoModelForCausalLM")
    check(scores(tmp_path, PAIRS, "Find planets"), found[:, yes] - found[:, no])


def test_qwen3_reranker_as_a_classifier_gets_the_texts_that_its_client_formats(tmp_path: Path) -> None:
    save_qwen3(tmp_path, "Qwen3ForSequenceClassification", **ONE_CLASS)
    pairs: Pairs = [
        (f"{PREFIX}<Instruct>: {INSTRUCTION}\n<Query>: {query}\n", f"<Document>: {document}{SUFFIX}")
        for query, document in PAIRS
    ]
    logit = logits(tmp_path, [first + second for first, second in pairs], "AutoModelForSequenceClassification")
    check(scores(tmp_path, pairs), logit[:, 0].sigmoid())


def test_qwen3_reranker_as_a_classifier_with_its_own_template(tmp_path: Path) -> None:
    save_qwen3(tmp_path, "Qwen3ForSequenceClassification", **ONE_CLASS)
    save_sentence_files(tmp_path, "Transformer", activation=SIGMOID)
    logit = logits(tmp_path, [card_prompt(*pair) for pair in PAIRS], "AutoModelForSequenceClassification")
    check(scores(tmp_path, PAIRS), logit[:, 0].sigmoid())
