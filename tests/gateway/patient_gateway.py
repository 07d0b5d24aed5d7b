"""`python -m gateway`, more patient with its workers: they beat in the test's own process, which does much else."""

from __future__ import annotations

import functools

from gateway.__main__ import run
from gateway.dispatch import dispatcher
from gateway.fleet import readiness

WAITS = dict.fromkeys(
    ("claim_timeout_s", "disturbed_claim_timeout_s", "delivered_claim_timeout_s", "ack_timeout_s"), 20.0
)
dispatcher.FleetLimits = functools.partial(dispatcher.FleetLimits, silence_s=20.0, punctual_silence_s=20.0)
dispatcher.RecoveryLimits = functools.partial(dispatcher.RecoveryLimits, **WAITS)
# Tests know when a gateway knows their workers.
readiness.QUIET_FLEET_S = 0.0

__all__ = ["run"]
