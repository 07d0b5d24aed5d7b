"""What happens to the work of a client that leaves."""

from __future__ import annotations

from tests.integration.system import System
from tests.waiting import wait_for

# The answer would take 8 s more.
LIMIT_S = 6.0


def test_disconnect_gives_blocks_back_long_before_the_answer_would_end(simulated: System) -> None:
    # What other tests have left.
    wait_for(lambda: simulated.gauge("headrace_fleet_running") == 0, 60)
    idle_free = simulated.gauge("headrace_fleet_free_blocks")
    stream = simulated.client().completions.create(
        model=simulated.model,
        prompt="x " * 200,
        max_tokens=1600,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    wait_for(lambda: simulated.gauge("headrace_fleet_free_blocks") < idle_free, LIMIT_S)
    stream.close()
    wait_for(lambda: simulated.gauge("headrace_fleet_free_blocks") == idle_free, LIMIT_S)
    assert simulated.gauge("headrace_fleet_running") == 0


def test_background_response_is_cancelled_with_what_was_generated_though_little_of_it_was_recorded(
    simulated: System,
) -> None:
    client, generated = simulated.client(), simulated.gauge("vllm:generation_tokens_total")
    response = client.responses.create(
        model=simulated.model,
        input="x",
        background=True,
        max_output_tokens=1600,
        extra_body={"ignore_eos": True},
    )
    wait_for(lambda: client.responses.retrieve(response.id).status == "in_progress", LIMIT_S)
    # Some tokens, less than are recorded.
    wait_for(lambda: simulated.gauge("vllm:generation_tokens_total") >= generated + 20, LIMIT_S)
    cancelled = client.responses.cancel(response.id)
    assert cancelled.status == "cancelled"
    # The first token is recorded at once, the next ones after some seconds.
    assert len(cancelled.output_text) > 10
    wait_for(lambda: simulated.gauge("headrace_fleet_running") == 0, LIMIT_S)
    assert client.responses.retrieve(response.id).output_text == cancelled.output_text
