"""What becomes of a model whose workers end by themselves."""

from __future__ import annotations

from ops.stack.hosting.model_state import MAX_FAILURES, RETRY_FAILED_S, KnownModel
from ops.stack.hosting.reconcile import Activity


def test_failed_starts_are_repeated_with_growing_pauses_and_bad_settings_are_not() -> None:
    model = KnownModel(Activity(asked=True))
    pauses = []
    for now in range(MAX_FAILURES):
        assert model.activity.asked
        has_failed = model.note_failure("killed", float(now), was_well=False, is_final=False)
        assert has_failed == (now == MAX_FAILURES - 1)
        pauses.append(model.activity.may_start_at - now)
    assert pauses == [1.0, 2.0, RETRY_FAILED_S]
    assert not model.activity.asked
    # After it has served for a while, the next failure is a first one.
    assert not model.note_failure("killed", 100.0, was_well=True, is_final=False)
    assert model.activity.may_start_at == 101.0
    model = KnownModel(Activity(asked=True))
    assert model.note_failure("no tokenizer", 5.0, was_well=False, is_final=True)
    assert (model.activity.may_start_at, model.activity.asked, model.error) == (
        5.0 + RETRY_FAILED_S,
        False,
        "no tokenizer",
    )
