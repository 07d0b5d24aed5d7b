"""`headrace drain`: a worker ends without losing what it has, and the others serve on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import InternalServerError

from tests.integration.system import System, running_system
from tests.ops.cli.command import headrace


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    options = ["--simulate", "20", "--workers", "2", "--worker-id", "pair"]
    with running_system(tmp_path_factory.mktemp("drain"), *options) as system:
        yield system


def test_worker_that_is_cordoned_takes_nothing_until_it_is_uncordoned(pair: System, tmp_path: Path) -> None:
    state, audit = str(pair.ready_file.parent / "state"), tmp_path / "audit.jsonl"
    place = ["--state-dir", state, "--audit-file", str(audit)]
    for worker in ("pair-0", "pair-1"):
        done = headrace("cordon", worker, *place)
        assert (done.returncode, done.stdout) == (0, f"{worker} takes no more requests\n"), done.stderr
    with pytest.raises(InternalServerError, match="No worker serves"):
        pair.client(max_retries=0).completions.create(model=pair.model, prompt="def f():", max_tokens=5)
    done = headrace("uncordon", "pair-0", *place)
    assert (done.returncode, done.stdout) == (0, "pair-0 takes requests\n"), done.stderr
    answers = [pair.client().completions.create(model=pair.model, prompt="def f():", max_tokens=5) for _ in range(3)]
    assert all(answer.choices[0].text for answer in answers)
    assert headrace("uncordon", "pair-1", *place).returncode == 0
    actions = [json.loads(line)["action"] for line in audit.read_text().splitlines()]
    assert actions == ["worker.cordon", "worker.cordon", "worker.uncordon", "worker.uncordon"]


def test_worker_that_is_drained_ends_and_its_streams_go_on(pair: System, tmp_path: Path) -> None:
    before = set(pair.info["pids"]["worker"])
    options = {"prompt": "def f():", "max_tokens": 150, "extra_body": {"ignore_eos": True}}
    streams = [pair.client().completions.create(model=pair.model, stream=True, **options) for _ in range(4)]
    for stream in streams:
        next(stream)
    state, audit = str(pair.ready_file.parent / "state"), tmp_path / "audit.jsonl"
    done = headrace("drain", "pair-1", "--state-dir", state, "--audit-file", str(audit))
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["pair-1 drains", "pair-1 has ended"]
    assert json.loads(audit.read_text())["what"]["worker"] == "pair-1"
    assert sum(1 for stream in streams for chunk in stream if chunk.choices[0].finish_reason == "length") == 4
    # The other one is the same process as before.
    assert len(before & set(pair.info["pids"]["worker"])) == 1


def test_worker_that_is_not_heard_is_told_with_those_that_are(pair: System) -> None:
    done = headrace("drain", "nobody", "--state-dir", str(pair.ready_file.parent / "state"))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "no worker 'nobody' is heard; heard: pair-0" in done.stderr
