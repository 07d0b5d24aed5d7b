"""`headrace doctor` and `headrace worker --check` as a user runs them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from gateway.admission.api_keys import create_key
from gpu_worker.start.config import WorkerConfig
from ops.doctor.finding import Level
from ops.doctor.nats import NatsLogin, nats_findings
from ops.doctor.preflight import _device_and_memory
from ops.stack.config import DEMO_MODEL
from ops.stack.state import ReadyFile, write_ready_file
from tests.integration.system import System
from tests.ops.cli.command import headrace_here as headrace

DEMO = ("--model", str(DEMO_MODEL))


def test_running_system_is_described_in_one_page_without_secrets(cli_system: System) -> None:
    info = cli_system.info
    state = str(cli_system.ready_file.parent / "state")
    secret = {"HEADRACE_OPERATOR_KEY": "very-secret", "HEADRACE_MODEL": str(DEMO_MODEL)}
    done = headrace("doctor", "--state-dir", state, **secret)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    for topic in (
        *("versions", "packages", "processor", "memory", r"gpu(?: \d)?", "compiler", "nats-server", "redis-server"),
        *("disk, state", "disk, kernels", "disk, models", "nats rights", "queue", "clock"),
    ):
        assert re.search(rf"^ok +{topic} ", done.stdout, re.MULTILINE), topic
    assert re.search(r"^ok +workers +worker-\S+ serves headrace-demo", done.stdout, re.MULTILINE)
    assert f"{info['url']} is ready" in done.stdout
    assert re.search(r"redis +127.0.0.1:\d+/0 answers in", done.stdout)
    password = re.findall(r":([^:@/]+)@", info["admin_nats_url"])[0]
    hidden = ["very-secret", info["api_key"], info["operator_key"], password]
    assert [text for text in hidden if text in done.stdout] == []
    assert len(done.stdout.splitlines()) < 60


async def test_worker_that_runs_and_is_not_heard_is_a_warning(cli_system: System) -> None:
    login, workers = NatsLogin(cli_system.info["admin_nats_url"], "admin"), cli_system.info["pids"]["worker"]
    heard, missed = [await nats_findings(login, workers=each) for each in (workers, [*workers, 2**22 + 1])]
    assert heard[-1].level is Level.FINE
    assert (missed[-1].topic, missed[-1].level) == ("workers", Level.WARNING)
    assert missed[-1].text.endswith(f"; not heard: process {2**22 + 1}")


def test_what_is_wrong_has_a_remedy_and_exit_code_1(tmp_path: Path) -> None:
    options = ["--state-dir", str(tmp_path), "--nats-url", "nats://127.0.0.1:1"]
    options += ["--redis-url", "redis://:pw@127.0.0.1:1"]
    done = headrace("doctor", *options, "--url", "http://127.0.0.1:1", HEADRACE_MODLE="x")
    # Every command refuses an unknown variable; the doctor says so before it begins.
    assert (done.returncode, done.stderr.count("did you mean HEADRACE_MODEL?")) == (2, 1)
    done = headrace("doctor", *options, "--url", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert "FAIL  nats " in done.stdout
    assert "start it, or check --nats-url." in done.stdout
    assert "FAIL  gateway" in done.stdout
    assert "warn  redis" in done.stdout
    assert ":pw@" not in done.stdout
    assert done.stdout.strip().endswith("2 problems, 1 warning.")


def test_key_file_that_gateways_cannot_read_is_a_problem(tmp_path: Path) -> None:
    done = headrace("doctor", "--state-dir", str(tmp_path))
    assert not re.search(r"^\S+ +keys ", done.stdout, re.MULTILINE)
    create_key(tmp_path / "keys.json", tenant="a")
    done = headrace("doctor", "--state-dir", str(tmp_path))
    assert re.search(r"^ok +keys +\S+keys.json: 1 of 1 keys are valid$", done.stdout, re.MULTILINE)
    (tmp_path / "keys.json").write_text('[{"id": "key_1"')
    done = headrace("doctor", "--state-dir", str(tmp_path))
    assert re.search(r"^FAIL +keys +\S+keys.json, line 1: not JSON", done.stdout, re.MULTILINE), done.stdout
    assert done.returncode == 1
    done = headrace("doctor", "--state-dir", str(tmp_path / "none"), "--keys-file", str(tmp_path / "missing.json"))
    assert re.search(r"^FAIL +keys +\S+missing.json does not exist$", done.stdout, re.MULTILINE)


def test_wrong_directory_is_no_clean_bill_of_health(tmp_path: Path) -> None:
    done = headrace("doctor", "--state-dir", str(tmp_path))
    assert done.returncode == 0, done.stdout
    for topic in ("nats", "redis", "gateway"):
        assert re.search(rf"^-- +{topic} +no `headrace up` runs on {tmp_path}, and --", done.stdout, re.MULTILINE), (
            topic
        )
    assert "-> give --state-dir of one that runs, or --nats-url\n" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("Not found, so not checked: nats, redis, gateway.")


def test_system_that_was_killed_is_one_cause_and_told_at_once(tmp_path: Path) -> None:
    gone, nowhere = 2**22 + 1, "nats://127.0.0.1:1"
    pids = {"nats": [gone], "gateway": [gone + 1]}
    url = "http://127.0.0.1:1"
    write_ready_file(tmp_path / "ready.json", ReadyFile(url, "k", nowhere, nowhere, None, url, "o", pids))
    (tmp_path / "lock").write_text(str(gone))
    done = headrace("doctor", "--state-dir", str(tmp_path))
    assert (done.returncode, re.findall(r"^(?:FAIL|WARN) +(\w+)", done.stdout, re.MULTILINE)) == (1, ["state"])
    assert f"the `headrace up` of {tmp_path} was killed, with all its parts" in done.stdout
    for command in (["usage"], ["chat", "x"], ["dead", "list"]):
        place = ["--state-dir", str(tmp_path)]
        done = headrace(command[0], *place, *command[1:]) if command[0] == "dead" else headrace(*command, *place)
        assert (done.returncode, done.stderr) == (2, f"headrace: no `headrace up` runs on {tmp_path}; start it\n")


def test_gateway_that_is_named_is_looked_at_without_nats(tmp_path: Path) -> None:
    done = headrace("doctor", "--state-dir", str(tmp_path), "--url", "http://127.0.0.1:1")
    assert "FAIL  gateway" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("Not found, so not checked: nats, redis.")


def test_worker_that_could_serve_passes_its_check_and_does_not_join(nats_url: str) -> None:
    options = ["--model", str(DEMO_MODEL), "--nats-url", nats_url, "--served-model-name", "checked"]
    done = headrace("worker", "--check", *options)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    for topic in ("model", "device", "weights", "sizes", "nats rights", "revision"):
        assert re.search(rf"^ok +{topic} ", done.stdout, re.MULTILINE), done.stdout
    assert done.stdout.index(" device ") < done.stdout.index(" weights ") < done.stdout.index(" sizes ")


def test_simulated_worker_needs_neither_device_nor_weights(nats_url: str, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, tmp_path)
    done = headrace("worker", "--check", "--model", str(tmp_path), "--nats-url", nats_url, "--simulate", "1")
    assert done.returncode == 0, done.stdout
    assert re.search("^ok +device +none: the engine is simulated$", done.stdout, re.MULTILINE)
    done = headrace("worker", "--check", "--model", str(tmp_path), "--nats-url", nats_url)
    assert done.returncode == 1
    assert re.search("^FAIL +weights ", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize(("share", "level"), [(2.0, "ok"), (1.1, "warn"), (0.5, "FAIL")])
def test_weights_are_compared_with_the_memory(share: float, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = (DEMO_MODEL / "model.safetensors").stat().st_size
    monkeypatch.setattr("gpu_worker.layers.free_memory.free_host_bytes", lambda: int(share * num_bytes))
    (_, told) = _device_and_memory(WorkerConfig(model=DEMO_MODEL, dtype="float16", device="cpu"), DEMO_MODEL)
    assert (told.topic, told.level.value) == ("weights", level)


@pytest.mark.parametrize(
    ("options", "topic", "words"),
    [
        (["--model", "/nowhere"], "model", "--model: /nowhere does not exist; name a folder"),
        ([], "model", "none is named"),
        ([*DEMO, "--num-blocks", "99999999"], "sizes", "a KV cache of 99999999 blocks needs"),
        pytest.param([*DEMO, "--device", "cuda"], "device", "cuda is asked for", marks=pytest.mark.slow),
        pytest.param([*DEMO, "--max-model-len", "9999"], "sizes", "made for 2048 tokens", marks=pytest.mark.slow),
        pytest.param([*DEMO, "--speculative", "draft"], "sizes", "--draft-model: is needed", marks=pytest.mark.slow),
    ],
)
def test_worker_that_could_not_serve_fails_its_check(options: list[str], topic: str, words: str, nats_url: str) -> None:
    done = headrace("worker", "--check", "--nats-url", nats_url, *options)
    assert done.returncode == 1
    assert re.search(rf"^FAIL +{topic} +.*{re.escape(words)}", done.stdout, re.MULTILINE), done.stdout
    assert done.stdout.count("FAIL ") == 1, done.stdout


@pytest.mark.slow
def test_check_finds_another_revision_in_the_fleet(cli_system: System) -> None:
    options = ["--model", str(DEMO_MODEL), "--served-model-name", "headrace-demo"]
    done = headrace("worker", "--check", *options, "--nats-url", _worker_url(cli_system))
    assert done.returncode == 1
    assert "serves another revision of 'headrace-demo'" in done.stdout


def _worker_url(cli_system: System) -> str:
    (pid,) = cli_system.info["pids"]["worker"]
    environ = dict(
        entry.split("=", 1) for entry in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in entry
    )
    password = environ["HEADRACE_NATS_PASSWORD"]
    return environ["HEADRACE_NATS_URL"].replace("://", f"://worker:{password}@")
