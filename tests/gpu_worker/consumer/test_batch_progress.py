"""What is kept of a running job, and for whom it counts."""

from __future__ import annotations

import dataclasses

from gpu_worker.consumer.batch_progress import NO_PROGRESS, ProgressRecords
from gpu_worker.consumer.held_request import HeldRequest
from gpu_worker.consumer.queued_message import QueuedMessage
from tests.gpu_worker.consumer.harness import TestGateway
from tests.gpu_worker.core.sequences import make_sequence


async def test_tokens_of_another_revision_or_message_are_not_continued(gateway: TestGateway) -> None:
    message = QueuedMessage("s", b"job", "ack", stream_seq=7, num_delivered=3, num_pending=0)
    held = HeldRequest("k", gateway.request(lane="batch", tenant="acme", reply=None), message)
    held.sequence, held.num_output_tokens, held.parts = make_sequence([1, 2], emitted=[5, 6]), 2, ["a", "b"]
    own, other = (ProgressRecords(gateway.nats, revision) for revision in ("own", "other"))
    assert await own.save(held)
    found = [await records.load("acme", held.request.id, message) for records in (own, other)]
    # Who has lost it and how often is told whatever weights it ran on.
    assert [(each.token_ids, each.text, each.num_delivered) for each in found] == [((5, 6), "ab", 3), ((), "", 3)]
    for changes in ({"data": b"another job"}, {"stream_seq": 8}):
        changed = dataclasses.replace(message, **changes)  # type: ignore[arg-type]
        assert await own.load("acme", held.request.id, changed) == NO_PROGRESS
