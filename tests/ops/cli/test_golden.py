"""`headrace golden record` and `check`, on a running system."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ops.cli import golden
from ops.cli.golden import Recorder
from ops.cli.running_system import Endpoint, ServerRefusedError
from shared.golden import read_baseline, read_key
from tests.integration.system import System
from tests.ops.cli.command import headrace_here
from tests.ops.load_generator.foreign_server import foreign_server


def test_baseline_is_recorded_signed_and_replayed_prompts_are_the_operators(state_dir: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text("\n".join(json.dumps(text) for text in ("def f(x):\n    return x\n" * 30, "a river " * 20)))
    files = ["--output", str(tmp_path / "out"), "--golden-key-file", str(tmp_path / "key")]
    done = headrace_here(
        "golden", "record", *files, "--prompts", str(prompts), "--label", "v1", "--state-dir", str(state_dir)
    )
    assert done.returncode == 0, done.stderr
    assert "2 prompts of headrace-demo" in done.stdout
    baseline = read_baseline(tmp_path / "out", read_key(tmp_path / "key", ""), "")
    assert (baseline.model, baseline.label, len(baseline.prompts)) == ("headrace-demo", "v1", 2)
    assert len(baseline.prompts[0].token_ids) > len(baseline.prompts[1].token_ids)
    # The simulated engine says the same of every token.
    assert {round(each, 6) for prompt in baseline.prompts for each in prompt.logprobs} == {
        round(baseline.prompts[0].logprobs[0], 6)
    }
    assert baseline.noise == 0.0
    assert len(baseline.answer) == 8


def test_recording_comes_back_when_its_place_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(golden.time, "sleep", waited.append)
    with foreign_server("busy", "busy", "not a stream", "broken") as server:
        recorder = Recorder(Endpoint(server.url, None), "theirs")
        server.num_asked = 2
        assert recorder._ask({"prompt": "x"}) == {"text": "all at once"}
        with pytest.raises(ServerRefusedError, match="no memory"):
            recorder._ask({"prompt": "x"})
    assert [each for each in waited if each] == [7.0, 7.0], "but for the server's own"
    assert server.bodies[0] == server.bodies[1] == server.bodies[2]
    said = "headrace: the server answers 503: full; waiting 7 s to ask again\n"
    assert capsys.readouterr().err.count(said) == 1, "not for each prompt"


def test_prompts_that_are_none_are_refused(state_dir: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text('"fine"\n{"text": 1}\n')
    files = ["--output", str(tmp_path / "out"), "--golden-key-file", str(tmp_path / "key")]
    done = headrace_here("golden", "record", *files, "--prompts", str(prompts), "--state-dir", str(state_dir))
    assert done.returncode != 0
    assert "line 2" in done.stderr
    assert not (tmp_path / "out").exists()


def test_check_tells_of_workers_without_a_baseline(cli_system: System, state_dir: Path) -> None:
    done = headrace_here("golden", "check", "--state-dir", str(state_dir))
    assert (done.returncode, done.stderr) == (1, "headrace: no worker has been probed yet: nothing is proved\n")
    assert "no baseline" in done.stdout


def test_drift_tells_that_one_worker_has_none_to_be_compared_with(cli_system: System, state_dir: Path) -> None:
    done = headrace_here("golden", "drift", "--state-dir", str(state_dir))
    assert done.returncode == 0, done.stderr
    assert "nothing to compare yet" in done.stdout
