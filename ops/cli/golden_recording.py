"""Records a baseline from a running system, by its HTTP API, and measures how far its own answers differ.

The first pass has the system to itself, prompt by prompt. The others ask for many prompts at once, so that batches have
other sizes and shapes, and workers others. The largest deviation between passes becomes part of the baseline: no probe
is judged more strictly than the system agrees with itself. Where workers disagree by more than any rounding, the
recording is refused.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ops.cli.running_system import Endpoint, ServerRefusedError
from shared.errors import HeadraceError
from shared.golden import (
    LONG_TOKENS,
    MAX_PROMPT_TOKENS,
    NUM_ANSWER_TOKENS,
    NUM_TOP,
    Baseline,
    GoldenPrompt,
    Likely,
)
from shared.golden_statistic import MAX_NOISE, answer_deviation, place_deviation, score_deviation, spread

MIN_TOKENS = 16
_PASSES = 2
_AT_ONCE = 8
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
        """Return a prompt's tokens, and what the system says of them."""
        asked = {"prompt": prompt, "max_tokens": 0, "prompt_logprobs": 0, "return_token_ids": True, "cache_salt": salt}
        choice = self._ask(asked)
        token_ids, entries = choice["prompt_token_ids"], choice["prompt_logprobs"][1:]
        pairs = zip(token_ids[1:], entries, strict=True)
        return GoldenPrompt(tuple(token_ids), tuple(entry[str(token_id)]["logprob"] for token_id, entry in pairs))

    def answer(self, token_ids: Sequence[int], salt: str) -> Answer:
        """Return the likely tokens behind a prompt, best first, in each of some places."""
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
        answer = self.endpoint.call("POST", "/v1/completions", {"model": self.model, **_PLAIN, **body})
        choice: dict[str, Any] = answer["choices"][0]
        return choice
