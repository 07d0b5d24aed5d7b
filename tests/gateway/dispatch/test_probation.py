from __future__ import annotations

from gateway.dispatch.inflight import Flight, FlightTable
from gateway.dispatch.probation import ProbationQueue
from shared.messages import Request
from tests.gateway.dispatch.test_inflight import NullSink


def test_tenants_take_turns_with_their_suspects() -> None:
    table = FlightTable()
    queue = ProbationQueue(table, lambda model: 1)
    # One tenant's many suspects were there before the other's only one.
    for number, tenant in enumerate(["many", "many", "many", "one"]):
        request = Request(id=str(number), model="m", text=f"prompt {number}", tenant=tenant)
        flight = Flight(request, NullSink(), 1, 0.0, probation=1)
        table.add(flight)
        queue.add(flight)
    order = []
    for _ in range(4):
        [ready] = queue.take_ready()
        order.append(ready.request.tenant)
        table.remove(ready)
    assert order == ["many", "one", "many", "many"]
