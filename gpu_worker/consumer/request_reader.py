"""What a wire request means for this model: its checks, and the sequence, output and prelude that it becomes."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from itertools import takewhile

from gpu_worker.adapters.slots import AdapterSlots
from gpu_worker.consumer.answer import PooledAnswers
from gpu_worker.consumer.held_request import Prelude
from gpu_worker.consumer.request_images import check_images
from gpu_worker.core.block_budget import BlockBudget, BlockScores, block_budget
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.text.model_directory import ModelDirectory
from gpu_worker.text.output_text import OutputText
from gpu_worker.text.prompt_encoder import PromptText, ScoredText
from gpu_worker.text.tokenizer import InfillPrompt, ModelTokenizer
from shared.adapter_calls import is_digest
from shared.conversation import ChatOptions, Conversation
from shared.errors import BadRequestError, prompt_too_long
from shared.messages import Request, TokenLogprob
from shared.sampling import Sampling, check_markable
from shared.server_clock import ServerClock

Prompt = PromptText | list[int]

# How a sequence is sampled that only has its prompt computed.
_NOTHING = Sampling(max_tokens=0)


class RequestBudgets:
    """Reads budgets. Keeps no state."""

    def __init__(self, sizes: SchedulerConfig, problem: str | None) -> None:
        """Read budgets for an engine of these sizes; `problem` is why its model cannot evict, None where it can."""
        self._problem = problem
        self._block_size = sizes.block_size
        self._max_num_blocks = min(sizes.num_blocks, sizes.max_model_len // sizes.block_size)

    def read(self, request: Request) -> BlockBudget | None:
        """Return the blocks that a sequence may hold, None for all it needs; `BadRequestError` if that cannot be."""
        if request.kv_budget is None:
            return None
        problem = self._problem
        if request.media:
            problem = "the request shows images"
        if request.pooling is not None:
            problem = "the request generates nothing"
        if problem is not None:
            message = f"kv_budget: no tokens can be evicted here, because {problem}."
            raise BadRequestError(message, "kv_budget", "unsupported_kv_budget")
        return block_budget(request.kv_budget, self._block_size, self._max_num_blocks)

    def scores(self, request: Request, budget: BlockBudget | None, num_tokens: int) -> BlockScores | None:
        """Return the scores of a sequence whose budget goes by them, with what earlier attempts evicted.

        Args:
            request: What it says of evictions is decided again where blocks have another size, or where that cannot
                have been: other workers tell it, and the request is not to blame for them.
            budget: Its budget.
            num_tokens: Of its prompt and its output, at most.
        """
        if budget is None or not budget.is_scored:
            return None
        told = request.evicted
        if told is None or told.first or told.block_size != budget.block_size:
            return BlockScores(budget)
        return BlockScores(budget, told.places if budget.can_have_evicted(told.places, num_tokens) else ())


class RequestReader:
    """Reads requests for one model. Keeps no state of its own."""

    def __init__(
        self,
        model: str,
        directory: ModelDirectory,
        max_model_len: int,
        tokenizer: ModelTokenizer,
        pooled: PooledAnswers,
        budgets: RequestBudgets,
        clock: ServerClock | None = None,
        adapters: AdapterSlots | None = None,
        *,
        sees: bool = False,
        watermark_tenants: Collection[str] = (),
    ) -> None:
        self._sees = sees
        self._watermark_tenants = frozenset(watermark_tenants)
        self._model = model
        self._eos_token_ids = directory.eos_token_ids
        self._max_model_len = max_model_len
        self._tokenizer = tokenizer
        self._pooled = pooled
        self._budgets = budgets
        self._clock = clock or ServerClock()
        self._adapters = adapters or AdapterSlots()

    def prompt(self, request: Request) -> Prompt:
        """Check a request and return its prompt; a list holds token ids. `BadRequestError` if it can never run."""
        if request.model != self._model:
            raise BadRequestError(f"This worker serves {self._model!r}, not {request.model[:64]!r}.", "model")
        if sum(field is not None for field in (request.messages, request.text, request.token_ids)) != 1:
            raise BadRequestError("Give exactly one of messages, text and token_ids.", "prompt")
        self._check_images(request)
        self._check_watermark(request)
        self._budgets.read(request)
        self._pooled.check(request)
        self._check_ids(request.emitted, "emitted")
        self._check_ids(request.sampling.logit_bias, "logit_bias")
        self._check_ids(request.sampling.stop_token_ids, "stop_token_ids")
        self._check_ids(request.sampling.allowed_token_ids or (), "allowed_token_ids")
        self._check_ids(request.sampling.logprob_token_ids, "logprob_token_ids")
        if request.suffix is not None:
            if request.text is None:
                raise BadRequestError("suffix: only a prompt that is a text may have one.", "suffix")
            return InfillPrompt(request.text, request.suffix)
        if request.token_ids is not None:
            if not request.token_ids:
                raise BadRequestError("The prompt has no tokens.", "prompt")
            return list(request.token_ids)
        if request.pooling is not None and request.pooling.query is not None:
            assert request.text is not None
            limit = None if request.truncate_prompt_tokens is None else self._pooled_limit(request)
            return ScoredText(request.pooling.query, request.text, request.pooling.instruction, limit)
        if request.messages is not None:
            return Conversation(request.messages, request.chat or ChatOptions())
        text = self._pooled.text(request)
        assert text is not None
        return text

    def _check_watermark(self, request: Request) -> None:
        if request.pooling is not None:
            return
        if request.sampling.watermark is not None:
            check_markable(request.sampling)
        elif request.tenant in self._watermark_tenants:
            message = f"Answers to tenant {request.tenant[:64]!r} carry a watermark, and the request has no key for it."
            raise BadRequestError(message, "sampling.watermark", "watermark_required")

    def _check_images(self, request: Request) -> None:
        if request.media or any(message.images for message in request.messages or ()):
            if not self._sees:
                raise BadRequestError(f"The model {self._model!r} reads no images.", "media", "unsupported_image")
            check_images(request)

    def truncated(self, request: Request, prompt_ids: list[int]) -> list[int]:
        """Return the part of a prompt that counts; `BadRequestError` if it is pooled and too long for the model."""
        limit = request.truncate_prompt_tokens
        if request.pooling is not None:
            return self._pooled_prompt(request, prompt_ids)
        if limit is None:
            return prompt_ids
        if limit < 0:
            # At least one token of both is left: a context has room for two.
            num_output_tokens = min(max(1, request.sampling.max_tokens or 1), self._max_model_len - 1)
            limit = self._max_model_len - num_output_tokens
        return prompt_ids[-max(1, limit) :]

    def _pooled_limit(self, request: Request) -> int:
        """Return how many tokens of a text, or of a pair, are embedded or scored."""
        limit = min(self._max_model_len, self._pooled.max_tokens or self._max_model_len)
        asked = request.truncate_prompt_tokens
        return limit if asked is None or asked < 0 else min(limit, max(1, asked))

    def _pooled_prompt(self, request: Request, prompt_ids: list[int]) -> list[int]:
        """Return the part that counts of a prompt that is embedded or scored: its first tokens."""
        limit = self._pooled_limit(request)
        if len(prompt_ids) <= limit:
            return prompt_ids
        if request.truncate_prompt_tokens is None:
            message = prompt_too_long(len(prompt_ids), limit, "tokens", limit)
            message += " Or send 'truncate_prompt_tokens': -1, which leaves out its end."
            raise BadRequestError(message, "prompt", "context_length_exceeded")
        # A text that is scored was cut before it became a prompt.
        return prompt_ids[:limit] if request.text is None else self._tokenizer.shortened(prompt_ids, limit)

    def sequence(
        self, request: Request, sequence_id: str, prompt_ids: list[int], prediction_ids: list[int]
    ) -> Sequence:
        """Return the sequence of a request, which begins with what earlier attempts have emitted.

        Raises:
            BadRequestError: The tokenizer makes tokens of the prompt that the model does not have.
        """
        self._check_ids(prompt_ids, "prompt" if request.messages is None else "messages")
        now, budget = time.monotonic(), self._budgets.read(request)
        sampling = request.sampling if request.pooling is None else _NOTHING
        max_tokens, slot = sampling.max_tokens, None
        if request.adapter is not None:
            slot = self._adapters.slot(request.adapter)
            assert slot is not None, "an adapter stays where it is while a request has it"
        if max_tokens is None:
            # A budget lets a text outgrow the context, where its client says how far.
            max_tokens = self._max_model_len - (0 if request.kv_budget is None else len(prompt_ids))
        return Sequence(
            id=sequence_id,
            token_ids=[*prompt_ids, *request.emitted],
            num_prompt_tokens=len(prompt_ids),
            sampling=sampling,
            max_tokens=max_tokens,
            eos_token_ids=self._eos_token_ids,
            lane=request.lane,
            priority=request.priority,
            arrival=now,
            deadline=None if request.deadline is None else now + request.deadline - self._clock.now(),
            tenant=request.tenant,
            key=request.key,
            weight=request.weight,
            salt=cache_salt(request),
            hints=request.cache_hints,
            adapter=slot,
            trace=request.trace or "",
            prediction=tuple(self._known(prediction_ids)),
            bad_words=self._bad_words(request),
            pooling=self._pooled.plan(request),
            budget=budget,
            scores=self._budgets.scores(request, budget, len(prompt_ids) + max_tokens),
        )

    def output(self, request: Request, prompt_ids: list[int]) -> OutputText:
        """Return the output of a request, as far as it has been delivered."""
        output = self._tokenizer.output_text(prompt_ids, request.sampling)
        # A sequence that is longer than the context gets no more text, unless it need not fit into that.
        if request.kv_budget is not None or len(prompt_ids) + len(request.emitted) <= self._max_model_len:
            output.replay(request.emitted)
        return output

    def prelude(self, request: Request, prompt_ids: list[int]) -> Prelude:
        """Return what goes with the first token."""
        text = ""
        if request.echo:
            is_whole = request.text is not None and request.truncate_prompt_tokens is None
            text = request.text or "" if is_whole else self._tokenizer.decode(prompt_ids)
        logprobs: list[TokenLogprob | None] | None = None if request.sampling.prompt_logprobs is None else [None]
        return Prelude(text, logprobs, tuple(prompt_ids) if request.return_prompt_token_ids else None)

    def _bad_words(self, request: Request) -> tuple[tuple[int, ...], ...]:
        sampling = request.sampling
        if not sampling.bad_words:
            return ()
        words = self._tokenizer.encode_words(sampling.bad_words)
        words = tuple(word for word in words if max(word) < self._tokenizer.vocab_size)
        bad = {word[0] for word in words if len(word) == 1}
        if sampling.allowed_token_ids is not None and bad.issuperset(sampling.allowed_token_ids):
            raise BadRequestError("bad_words: no token of allowed_token_ids is left.", "bad_words")
        return words

    def _known(self, token_ids: list[int]) -> Iterator[int]:
        """Return the tokens up to the first that the model does not have, and so never generates."""
        return takewhile(lambda token_id: token_id < self._tokenizer.vocab_size, token_ids)

    def _check_ids(self, token_ids: Collection[int], param: str) -> None:
        if not token_ids:
            return
        least, largest = min(token_ids), max(token_ids)
        if least < 0 or largest >= self._tokenizer.vocab_size:
            wrong = least if least < 0 else largest
            limit = self._tokenizer.vocab_size - 1
            message = f"{param}: token id {wrong} is not one of this model's, which are 0 to {limit}."
            raise BadRequestError(message, param)


def cache_salt(request: Request) -> bytes:
    """Return what the request's blocks in the prefix cache are shared by: adapter, tenant, and its own salt."""
    digest = request.adapter or ""
    root = b"\0" + bytes.fromhex(digest) if is_digest(digest) else b""
    return root + f"{len(request.tenant)}:{request.tenant}{request.cache_salt or ''}".encode()
