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


def suspect(table: FlightTable, request_id: str, tenant: str = "t", model: str = "m") -> Flight:
    request = Request(id=request_id, model=model, text=f"prompt {request_id}", tenant=tenant)
    flight = Flight(request, NullSink(), 1, 0.0, probation=1)
    table.add(flight)
    return flight


def test_tenant_whose_suspects_have_ended_is_as_new_as_any_other() -> None:
    table = FlightTable()
    queue = ProbationQueue(table, lambda model: 1)
    first = suspect(table, "a", "known")
    queue.add(first)
    assert queue.take_ready() == [first]
    table.remove(first)
    assert queue.take_ready() == []
    known, new = suspect(table, "b", "known"), suspect(table, "c", "new")
    queue.add(known)
    queue.add(new)
    assert queue.take_ready() == [known]


def test_suspects_of_another_model_take_no_place() -> None:
    table = FlightTable()
    queue = ProbationQueue(table, lambda model: 1)
    suspects = [suspect(table, name, model=model) for name, model in (("a", "m"), ("b", "n"), ("c", "m"))]
    for each in suspects:
        queue.add(each)
    assert queue.take_ready() == suspects[:2]
    assert queue.take_ready() == []
    assert [each.is_parked for each in suspects] == [False, False, True]
