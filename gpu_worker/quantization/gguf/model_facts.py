"""Facts about a model that are needed before it is loaded: its family, vocabulary size, and context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpu_worker.quantization.gguf.byte_reader import GGUFError
from gpu_worker.quantization.gguf.file import GGUFFile
from gpu_worker.quantization.gguf.metadata import TOKENS
from gpu_worker.quantization.gguf.tensor_names import ENCODER

ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM", "qwen3moe": "Qwen3MoeForCausalLM", "olmoe": "OlmoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM", "gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM", "phi3": "Phi3ForCausalLM", "glm4": "Glm4ForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM", "deepseek2": "DeepseekV2ForCausalLM", "olmo2": "Olmo2ForCausalLM",
    "exaone4": "Exaone4ForCausalLM", "cohere2": "Cohere2ForCausalLM", "granite": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM", "smollm3": "SmolLM3ForCausalLM", "starcoder2": "Starcoder2ForCausalLM",
    "seed_oss": "SeedOssForCausalLM", "qwen3next": "Qwen3NextForCausalLM", "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM", "gemma4": "Gemma4ForCausalLM", "falcon-h1": "FalconH1ForCausalLM",
    "lfm2": "Lfm2ForCausalLM", "lfm2moe": "Lfm2MoeForCausalLM", "mamba2": "Mamba2ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM", "nemotron_h_moe": "NemotronHForCausalLM",
    "granitehybrid": "GraniteMoeHybridForCausalLM", "llama4": "Llama4ForCausalLM", "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5-moe": "Ernie4_5_MoeForCausalLM", "dots1": "Dots1ForCausalLM",
    "hunyuan-dense": "HunYuanDenseV1ForCausalLM", "hunyuan-moe": "HunYuanMoEV1ForCausalLM",
    "minimax-m2": "MiniMaxM2ForCausalLM", "arcee": "ArceeForCausalLM", "mistral3": "Ministral3ForCausalLM",
    "command-r": "CohereForCausalLM", "chatglm": "GlmForCausalLM", "exaone-moe": "ExaoneMoeForCausalLM",
    "nemotron": "NemotronForCausalLM", "phi2": "PhiForCausalLM", "phimoe": "PhiMoEForCausalLM",
    "gptneox": "GPTNeoXForCausalLM", "stablelm": "StableLmForCausalLM", "jais2": "Jais2ForCausalLM",
    "gpt2": "GPT2LMHeadModel", "hy_v3": "HYV3ForCausalLM", "afmoe": "AfmoeForCausalLM", "apertus": "ApertusForCausalLM",
    "mimo2": "MiMoV2FlashForCausalLM", "mellum": "MellumForCausalLM", ENCODER: "BertModel",
    "modern-bert": "ModernBertModel", "nomic-bert": "NomicBertModel", "jina-bert-v3": "JinaEmbeddingsV3Model",
    "eurobert": "EuroBertModel",
}  # fmt: skip
"""What GGUF calls the families that can be served."""

SAME_FILES: Mapping[str, tuple[str, ...]] = {
    "MistralForCausalLM": ("llama", "mistral3"), "MixtralForCausalLM": ("llama",),
    "DeepseekV3ForCausalLM": ("deepseek2",), "Glm4MoeLiteForCausalLM": ("deepseek2",),
    "YoutuForCausalLM": ("deepseek2",), "InternLM3ForCausalLM": ("llama",), "IQuestCoderForCausalLM": ("llama",),
    "Olmo3ForCausalLM": ("olmo2",),
    "GraniteMoeSharedForCausalLM": ("granitemoe",),
    # Of models with attention alone.
    "GraniteMoeHybridForCausalLM": ("granite", "granitemoe"),
    "BambaForCausalLM": ("granitehybrid",), "SolarOpenForCausalLM": ("glm4moe",), "RobertaModel": (ENCODER,),
    "XLMRobertaModel": (ENCODER,),
}  # fmt: skip
"""More families whose files are of one of these architectures."""

_MAX_LEN = 1 << 24


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a model.

    Attributes:
        architecture: As GGUF calls it; the prefix of the metadata's keys.
        context_length: Tokens, before any rope scaling.
        pooling_type: llama.cpp's number, 1 mean, 2 first and 3 last token; None where absent.
        num_classes: That an encoder's own head scores; 0 where it has none.
    """

    architecture: str
    vocab_size: int
    context_length: int
    hidden_size: int
    pooling_type: int | None
    num_classes: int = 0


def model_facts(file: GGUFFile) -> ModelFacts:
    """Read the facts of a file; `GGUFError` if its model is not supported, not whole, or malformed."""
    metadata = file.metadata
    architecture = metadata.text("general.architecture")
    if architecture not in ARCHITECTURES:
        problem = f"is {architecture[:80]!r}; supported: {', '.join(ARCHITECTURES)}"
        raise metadata.error("general.architecture", problem)
    if metadata.integer("split.count", 1, minimum=0) > 1:
        problem = "says that the model is split over several files; merge them with llama.cpp's llama-gguf-split"
        raise metadata.error("split.count", problem)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise GGUFError(file.path, "tensor 'token_embd.weight'", "is missing; the file holds no whole model")
    vocab_size, num_tokens = embedding.shape[0], len(metadata.texts(TOKENS))
    if num_tokens > vocab_size:
        raise metadata.error(TOKENS, f"has {num_tokens} tokens, but token_embd.weight {vocab_size} rows")
    context_length = metadata.integer(f"{architecture}.context_length", maximum=_MAX_LEN)
    pooling = f"{architecture}.pooling_type"
    pooling_type = metadata.integer(pooling, minimum=-1) if pooling in metadata else None
    head = file.tensors.get("cls.output.bias") if architecture == ENCODER else None
    num_classes = 0 if head is None else head.shape[0]
    return ModelFacts(architecture, vocab_size, context_length, embedding.shape[1], pooling_type, num_classes)
