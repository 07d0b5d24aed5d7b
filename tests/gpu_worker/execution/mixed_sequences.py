"""Sequences that ask for different things, of whose prompts some begin alike and others repeat themselves."""

from __future__ import annotations

from collections.abc import Iterator

from gpu_worker.core.sequence import Sequence
from shared.grammar import Grammar
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import random_prompt
from tests.gpu_worker.structured_output.tiny_tokenizer import EOS, constraint_of

LETTERS = Grammar(kind="regex", source="[a-f]+;")
FORCING = Grammar(kind="regex", source="(yes, yes, yes|no, no, no)!")
SAMPLINGS = [
    Sampling(temperature=0.0, logprobs=3),
    Sampling(seed=3, temperature=0.9, grammar=LETTERS),
    Sampling(seed=4, temperature=0.7, repetition_penalty=1.2, frequency_penalty=0.3, min_tokens=6, logprobs=2),
    Sampling(temperature=0.0, grammar=FORCING),
    Sampling(seed=6, temperature=1.1, top_p=0.9, logit_bias={5: 2.0}, prompt_logprobs=1),
    Sampling(seed=7, temperature=0.8, grammar=FORCING, logprobs=0),
    Sampling(seed=8, temperature=0.9, top_k=20, min_p=0.02, bad_words=("x",)),
]


def mixed_sequences(count: int) -> Iterator[Sequence]:
    for number in range(count):
        sampling = SAMPLINGS[number % len(SAMPLINGS)]
        # Every other prompt repeats itself, which n-grams draft from.
        own = random_prompt(3 + 5 * (number % 4), seed=number)
        prompt = own * 3 if number % 2 else [*random_prompt(10, seed=99), *own]
        sequence = Sequence(
            f"s{number}", prompt, len(prompt), sampling, max_tokens=18, eos_token_ids=frozenset({EOS}), arrival=number
        )
        if sampling.grammar is not None:
            sequence.constraint = constraint_of(sampling)
        if sampling.bad_words:
            sequence.bad_words = ((prompt[0], prompt[1]), (prompt[2],))
        yield sequence
