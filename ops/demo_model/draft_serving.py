"""What a draft of the demo model is worth in the engine that serves it: tokens that a step makes, greedily."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gpu_worker.core.sequence import Sequence
from gpu_worker.core.speculation import Speculation
from gpu_worker.execution.build import build_runner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.proposer_setup import build_proposer
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from ops.bench.spec.fixed_depth import FixedDepth
from ops.demo_model.corpus import held_out_documents
from ops.demo_model.export import MODEL_FOLDER
from ops.train_draft.own_text import BATCHED_TOKENS, make_engine
from shared.sampling import Sampling

NUM_PROMPTS = 32
PROMPT_TOKENS = 160
ANSWER_TOKENS = 128
NUM_DRAFT_TOKENS = 5
_SETTINGS = {"model": "draft", "medusa": "medusa", "eagle": "eagle"}


def held_out_prompts(count: int) -> list[list[int]]:
    """Return pieces of the held-out modules, evenly spread over them."""
    tokenizer = ModelTokenizer(read_model_directory(MODEL_FOLDER))
    text = tokenizer.encode_text("".join(held_out_documents()), add_special_tokens=False)
    starts = torch.linspace(0, len(text) - PROMPT_TOKENS, count).long().tolist()
    return [text[start : start + PROMPT_TOKENS] for start in starts]


def serve_drafts(kind: str, folder: Path, num_prompts: int = NUM_PROMPTS) -> dict[str, Any]:
    """Answer held-out prompts greedily with a draft of a kind.

    Returns:
        Draft tokens allowed, how many prompts and tokens, and the mean tokens accepted of a draft.

    Raises:
        RuntimeError: The engine failed; the cause says why.
    """
    prompts = held_out_prompts(num_prompts)
    length = PROMPT_TOKENS + ANSWER_TOKENS
    config = RunnerConfig(
        MODEL_FOLDER,
        num_blocks=num_prompts * (-(-length // 16) + 1),
        max_num_seqs=num_prompts,
        max_num_batched_tokens=BATCHED_TOKENS,
        max_model_len=length + 1,
        num_threads=torch.get_num_threads(),
    )
    runner = build_runner(config)
    settings = WorkerConfig(model=MODEL_FOLDER, speculative=_SETTINGS[kind], draft_model=folder)
    runner.verify_drafts_of(build_proposer(settings, config, runner))
    speculation = Speculation(FixedDepth(NUM_DRAFT_TOKENS))
    engine = make_engine(runner, num_prompts, speculation)
    for number, prompt in enumerate(prompts):
        sampling = Sampling(temperature=0.0, ignore_eos=True)
        engine.add(Sequence(str(number), list(prompt), len(prompt), sampling, max_tokens=ANSWER_TOKENS))
    while engine.has_work():
        engine.step()
        if engine.last_error is not None:
            raise RuntimeError("the engine failed") from engine.last_error
    return {
        "draft_tokens": NUM_DRAFT_TOKENS,
        "prompts": num_prompts,
        "prompt_tokens": PROMPT_TOKENS,
        "answer_tokens": ANSWER_TOKENS,
        "accepted_a_draft": round(speculation.num_accepted_tokens / max(1, speculation.num_drafts), 3),
        "tokens_a_draft": round(speculation.num_draft_tokens / max(1, speculation.num_drafts), 3),
    }
