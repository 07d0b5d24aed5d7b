from __future__ import annotations

import json
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from ops.simulation.outcome import Outcome
from ops.simulation.workload import Arrival, Synthetic, TraceError, read_trace


def test_drawn_requests_have_the_rate_lengths_and_burstiness_asked_for() -> None:
    arrivals = list(Synthetic(20_000, 50.0, 500, 200, spread=0.5, burstiness=0.25).arrivals(3))
    gaps = [later.at - earlier.at for earlier, later in pairwise(arrivals)]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(2.0, rel=0.1)
    assert statistics.mean([each.prompt for each in arrivals]) == pytest.approx(500, rel=0.02)
    assert statistics.mean([each.output for each in arrivals]) == pytest.approx(200, rel=0.02)


def test_prompts_have_nothing_but_their_beginnings_in_common() -> None:
    one, other = (Arrival(0.0, 40, 1, beginnings=((5, 16),)).token_ids(number) for number in (1, 2))
    assert one[:16] == other[:16]
    assert len(one) == len(set(one)) == 40
    assert all(first != second for first, second in zip(one[16:], other[16:], strict=True))
    assert 0 <= min(one) < max(one) < 2**31


def test_trace_of_our_own_form_is_read(tmp_path: Path) -> None:
    lines = [
        {"at": 105.5, "prompt": 40, "output": 3, "tenant": "a"},
        {"at": 100, "prompt": 32, "output": 2, "prefix": "system", "prefix_tokens": 32},
        {"at": 101, "prompt": 80, "output": 2, "prefix": "system", "prefix_tokens": 32},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    first, second, last = read_trace(path)
    assert (first.at, second.at, last.at, last.tenant) == (0, 1, 5.5, "a")
    assert first.token_ids(1)[:32] == second.token_ids(2)[:32]
    assert (len(first.token_ids(1)), len(second.token_ids(2))) == (32, 80)


def test_traces_of_mooncake_share_the_blocks_of_equal_hashes(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 2500, "input_length": 1600, "output_length": 5, "hash_ids": [0, 1, 9, 10]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second = read_trace(path)
    assert second.at == 2.5
    one, other = first.token_ids(1), second.token_ids(2)
    assert (len(one), len(other)) == (1100, 1600)
    assert one[:1024] == other[:1024]
    assert all(first != second for first, second in zip(one[1024:], other[1024:1100], strict=True))


def test_traces_of_azure_are_read(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:01:58.9800000,4808,10\n2023-11-16 18:02:00.4800000,110,27\n"
    )
    assert read_trace(path) == [Arrival(0.0, 4808, 10), Arrival(1.5, 110, 27)]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2: is no JSON object"),
        ('{"at": 1, "prompt": 5}', "line 2: 'output' is missing"),
        ('{"at": 1, "prompt": 0, "output": 1}', "line 2: prompt and output must have 1 to 4194304 tokens"),
        ('{"at": NaN, "prompt": 1, "output": 1}', "line 2: its time is not a number"),
        ('{"at": "soon", "prompt": 1, "output": 1}', "line 2: could not convert"),
        ("[1]", "line 2: is no JSON object"),
        ('{"at": 1, "prompt": 5, "output": 1, "tenent": "a"}', "line 2: 'tenent' is unknown; there are at, prompt"),
        (
            '{"at": 1, "prompt": 5, "output": 1, "prefix": "a", "prefix_tokens": 6}',
            "line 2: prefix_tokens is 6; it must be from 0 to prompt",
        ),
        ('{"at": 1, "prompt": 5, "output": 1, "prefix_tokens": 2}', "line 2: "),
        ('{"at": 1, "prompt": 5, "output": 1, "prefix": "a"}', "line 2: "),
    ],
)
def test_unusable_line_of_a_trace_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at": 0, "prompt": 5, "output": 5}\n' + line)
    with pytest.raises(TraceError) as refused:
        read_trace(path)
    assert str(refused.value).startswith(f"{path}: {problem}")


def test_empty_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(TraceError, match="has no requests"):
        read_trace(tmp_path / "empty")


def test_refused_share_is_of_all_attempts_those_included_that_are_never_served() -> None:
    assert Outcome().refused_share == 0.0
    outcome = Outcome(num_workers=7, num_refusals=2, num_unserved=3, ttfts_s=[0.1] * 5)
    assert outcome.refused_share == 0.2
