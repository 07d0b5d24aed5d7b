from __future__ import annotations

from pathlib import Path

import pytest

from gpu_worker.core.draft import Draft
from gpu_worker.core.sequence import Sequence
from gpu_worker.speculative.self_speculation.proposer import SelfSpeculationProposer
from ops.bench.spec.fixed_depth import FixedDepth
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import make_runner, make_sequence, random_prompt, run, save_tiny_model
from tests.gpu_worker.speculative.recorder import recorded_runner

SAMPLINGS = [
    Sampling(max_tokens=20, temperature=0.0),
    Sampling(max_tokens=20, temperature=0.9, seed=5),
    Sampling(max_tokens=20, temperature=0.9, top_p=0.9, frequency_penalty=0.5, seed=6),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-model")
    save_tiny_model(directory)
    return directory


def sequences(count: int = 6) -> list[Sequence]:
    return [
        make_sequence(str(index), random_prompt(2 + 7 * index, seed=index), SAMPLINGS[index % 3])
        for index in range(count)
    ]


@pytest.mark.parametrize("how", [{"token_budget": 200}, {"num_blocks": 36, "headroom_tokens": 0}])
def test_all_layers_are_right_unless_penalties_say_otherwise(directory: Path, how: dict[str, int]) -> None:
    runner, recorder = recorded_runner(directory, lambda *_: None, speculative="self", self_speculation_layers=2)
    outcome = run(runner, (asked := sequences()), policy=FixedDepth(3), **how)
    assert not recorder.failures
    assert outcome.tokens == run(make_runner(directory), sequences()).tokens
    for sequence in asked:
        assert sequence.num_drafted_tokens > 0
        if sequence.sampling.frequency_penalty == 0:
            assert sequence.num_accepted_tokens == sequence.num_drafted_tokens


@pytest.mark.parametrize("is_fused", [True, False])
def test_drafts_are_those_of_a_model_without_the_other_layers(
    directory: Path, tmp_path: Path, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_fused:
        monkeypatch.setattr("gpu_worker.models.decoder.fusing_library", lambda *_: None)
    drafts: list[tuple[int, Draft]] = []
    runner, recorder = recorded_runner(
        directory,
        lambda request, draft: drafts.append((len(request.sequence.token_ids), draft)),
        speculative="self",
        self_speculation_layers=1,
    )
    tokens = run(runner, sequences(1), policy=FixedDepth(3), token_budget=200).tokens["0"]
    assert not recorder.failures
    assert len(drafts) > 5

    cut = save_tiny_model(tmp_path)
    cut.model.layers = cut.model.layers[:1]
    cut.config.num_hidden_layers = 1
    cut.save_pretrained(tmp_path)
    whole = [*sequences(1)[0].token_ids, *tokens]
    for length, draft in drafts:
        prefix = make_sequence("p", whole[:length], Sampling(max_tokens=len(draft), temperature=0.0))
        assert draft.token_ids == tuple(run(make_runner(tmp_path), [prefix]).tokens["p"])


def test_more_sequences_than_the_batch_has_rows_are_drafted_for_in_turn(directory: Path) -> None:
    runner, recorder = recorded_runner(directory, lambda *_: None, speculative="self", self_speculation_layers=1)
    short = Sampling(max_tokens=3, temperature=0.0)
    asked = [make_sequence(str(index), random_prompt(3, seed=index), short) for index in range(50)]
    run(runner, asked, policy=FixedDepth(1), max_num_seqs=8)
    assert not recorder.failures
    assert all(sequence.num_drafted_tokens > 0 for sequence in asked)
    assert isinstance(recorder.proposer, SelfSpeculationProposer)
    assert recorder.proposer._doubles == {}
