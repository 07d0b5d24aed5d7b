"""Makes the receipt of a request when its attempt ends here."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpu_worker.consumer.held_request import HeldRequest
from gpu_worker.core.sequence import PrefillRecord
from shared.bounds import MAX_DURATION_S
from shared.receipt import PrefillPart, Receipt


class ReceiptWriter:
    """Writes receipts of one worker."""

    def __init__(self, num_devices: int = 1, watts: Callable[[], float | None] = lambda: None) -> None:
        """Count the seconds of a step for each device; `watts` is the power that one of them has drawn lately."""
        self._num_devices = num_devices
        self._watts = watts

    def receipt(self, held: HeldRequest, num_output_tokens: int) -> Receipt:
        """Return the receipt of a request that ends now; it pays for no further step."""
        taken_at, sequence = held.taken_at, held.sequence
        taken = time.time() - (time.monotonic() - taken_at)
        # A sender may say that it has made the request at any time.
        ended_s, queued_s = time.monotonic() - taken_at, min(held.queued_s, MAX_DURATION_S)
        waited_s = max(0.0, taken_at - held.message.came_at)
        if sequence is None or held.admitted_at is None:
            return Receipt(taken=taken, queued_s=queued_s, waited_s=waited_s, ended_s=ended_s)
        sequence.record.is_closed = True
        record, devices, watts = sequence.record, self._num_devices, self._watts()
        device_s = record.device_s * devices
        return Receipt(
            taken=taken,
            queued_s=queued_s,
            waited_s=waited_s,
            admitted_s=held.admitted_at - taken_at,
            scheduled_s=_since(taken_at, sequence.scheduled_at),
            first_s=_since(taken_at, held.first_output_at),
            ended_s=ended_s,
            num_devices=devices,
            device_s=device_s,
            prefill_s=record.prefill_s * devices,
            rejected_s=record.rejected_s * devices,
            recomputed_s=record.recomputed_s * devices,
            energy_j=None if watts is None else watts * device_s,
            prompt_tokens=sequence.num_prompt_tokens,
            cached_tokens=sequence.num_cached_tokens,
            output_tokens=num_output_tokens,
            drafted_tokens=sequence.num_drafted_tokens,
            accepted_tokens=min(sequence.num_accepted_tokens, num_output_tokens),
            prefills=tuple([_shown(part, taken_at) for part in record.prefills]),
            preempted_s=tuple([max(0.0, at - taken_at) for at in record.preempted_at]),
        )


def _shown(part: PrefillRecord, taken_at: float) -> PrefillPart:
    return PrefillPart(max(0.0, part.began_at - taken_at), max(0.0, part.landed_at - part.began_at), part.num_tokens)


def _since(taken_at: float, moment: float | None) -> float | None:
    return None if moment is None else max(0.0, moment - taken_at)
