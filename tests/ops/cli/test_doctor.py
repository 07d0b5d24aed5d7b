"""`headrace doctor` and `headrace worker --check` as a user runs them."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.admission.api_keys import create_key
from ops.doctor.finding import Finding, Level, page, problem, unseen, verdict, warning
from ops.doctor.servers import NatsLogin, clock_finding, cluster_finding, gateway_findings, nats_findings, redis_finding
from ops.doctor.settings import place_of, setting_findings, shown_value
from ops.stack.config import DEMO_MODEL
from ops.stack.state import ReadyFile, write_ready_file
from tests.integration.system import System
from tests.ops.cli.command import headrace
from tests.ops.nats.secured import PASSWORDS, secured_server
from tests.servers import NatsServer, RedisServer


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with secured_server(tmp_path_factory.mktemp("secured")) as server:
        yield server


def test_running_system_is_described_in_one_page_without_secrets(cli_system: System) -> None:
    info = cli_system.info
    state = str(cli_system.ready_file.parent / "state")
    secret = {"HEADRACE_OPERATOR_KEY": "very-secret", "HEADRACE_MODEL": str(DEMO_MODEL)}
    done = headrace("doctor", "--state-dir", state, **secret)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    for topic in (
        "versions",
        "packages",
        "processor",
        "memory",
        "compiler",
        "processes",
        "nats rights",
        "queue",
        "clock",
    ):
        assert re.search(rf"^ok +{topic} ", done.stdout, re.MULTILINE), topic
    assert re.search(r"^ok +workers +worker-\S+ serves headrace-demo", done.stdout, re.MULTILINE)
    assert f"{info['url']} is ready" in done.stdout
    assert re.search(r"redis +127.0.0.1:\d+/0 answers in", done.stdout)
    hidden = [
        "very-secret",
        info["api_key"],
        info["operator_key"],
        re.findall(r":([^:@/]+)@", info["admin_nats_url"])[0],
    ]
    assert [text for text in hidden if text in done.stdout] == []
    assert len(done.stdout.splitlines()) < 60


async def test_worker_that_runs_and_is_not_heard_is_a_warning(cli_system: System) -> None:
    login, workers = NatsLogin(cli_system.info["admin_nats_url"], "admin"), cli_system.info["pids"]["worker"]
    heard, missed = [await nats_findings(login, workers=each) for each in (workers, [*workers, 2**22 + 1])]
    assert heard[-1].level is Level.FINE
    assert (missed[-1].topic, missed[-1].level) == ("workers", Level.WARNING)
    assert missed[-1].text.endswith(f"; not heard: process {2**22 + 1}")


def test_what_is_wrong_has_a_remedy_and_exit_code_1(tmp_path: Path) -> None:
    options = [
        "--state-dir",
        str(tmp_path),
        "--nats-url",
        "nats://127.0.0.1:1",
        "--redis-url",
        "redis://:pw@127.0.0.1:1",
    ]
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


@pytest.mark.parametrize(
    "url",
    [
        "redis://:sec/ret@h:1/0",
        "nats://u:sec@ret@h:1",
        "nats://u:sec ret@h:1",
        "nats://u:sec,ret@h:1",
        "nats://u:sec?ret@h:1",
        "u:secret@h:1",
        "nats://u:x@g:1,u:secret@h:1",
        "redis://h:1/0?password=secret",
        "redis://h:1/0?password=sec@ret",
    ],
)
def test_login_of_a_badly_written_url_is_hidden_everywhere(url: str) -> None:
    findings = [*setting_findings({"HEADRACE_NATS_URL": url}), *gateway_findings(url), asyncio.run(redis_finding(url))]
    shown = page(findings, str)
    assert not re.search("sec|ret(?!r)", shown), shown


def test_url_without_secrets_is_shown_as_it_is() -> None:
    for url in ("http://h:4318/v1/traces", "nats://a:4222,nats://b:4222", "tls://[::1]:4222"):
        assert shown_value("HEADRACE_OTLP_ENDPOINT", url) == url
    assert place_of("nats://u:p@a:1,tls://b:2") == "a:1, b:2"
    assert shown_value("HEADRACE_MODEL", "Qwen/Qwen3-0.6B@main") == "Qwen/Qwen3-0.6B@main"


def test_text_of_others_forges_no_line_of_the_page() -> None:
    shown = page([problem("workers", "w\nok    nats    all is well\x1b[2J serves m")], str)
    assert len(shown.splitlines()) == 3
    assert "\x1b" not in shown


def test_secrets_are_hidden_wherever_they_stand() -> None:
    assert shown_value("HEADRACE_API_KEY", "hr-1") == "(hidden)"
    assert shown_value("HEADRACE_NATS_PASSWORD", "") == "(empty)"
    assert shown_value("HEADRACE_KEYS_FILE", "/a/keys.json") == "/a/keys.json"
    assert shown_value("HEADRACE_NATS_URL", "nats://u:p@a:4222,nats://u:p@b:4222").count("(hidden)@") == 2
    assert "secret" not in page(
        list(setting_findings({"HEADRACE_REDIS_URL": "redis://:secret@h/0", "HF_TOKEN": "secret"})), str
    )


@pytest.mark.parametrize(
    "role", [pytest.param("gateway", marks=pytest.mark.slow), "worker", pytest.param("admin", marks=pytest.mark.slow)]
)
async def test_rights_of_each_role_are_tried(secured: NatsServer, role: str) -> None:
    login = NatsLogin(secured.url, role, role, PASSWORDS[role])  # type: ignore[arg-type]
    assert [one for one in await nats_findings(login) if one.level is Level.PROBLEM] == []
    other = "worker" if role == "gateway" else "gateway"
    found = await nats_findings(dataclasses.replace(login, role=other))  # type: ignore[arg-type]
    (refused,) = [one for one in found if one.level is Level.PROBLEM]
    assert refused.topic == "nats rights"
    assert f"the user `{other}`" in refused.text
    assert refused.remedy == ""


async def test_wrong_password_is_a_problem_without_the_password(secured: NatsServer) -> None:
    (finding,) = await nats_findings(NatsLogin(secured.url, "worker", "worker", "not-this"))
    assert finding.level is Level.PROBLEM
    assert "refuses the user or password" in finding.text
    assert "not-this" not in finding.text


@pytest.mark.parametrize(("skew", "level"), [(0.01, Level.FINE), (1.0, Level.WARNING), (-60.0, Level.PROBLEM)])
def test_clocks_that_are_apart_are_told(skew: float, level: Level) -> None:
    finding = clock_finding("2026-01-02T03:04:05.123456789Z", 1767323045.123456789 + skew)
    assert finding is not None
    assert (finding.level, finding.text.split()[2]) == (level, "ahead" if skew > 0 else "behind")
    assert clock_finding("", 0.0) is None


async def test_redis_that_refuses_the_password_is_a_warning(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, ("--requirepass", "right"))
    server.start()
    try:
        url = f"redis://:right@127.0.0.1:{server.port}/0"
        assert (await redis_finding(url)).level is Level.FINE
        refused = await redis_finding(url.replace("right", "wrong-one"))
    finally:
        server.kill()
    assert refused.level is Level.WARNING
    assert "invalid username-password" in refused.text
    assert "wrong-one" not in refused.text


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
    assert done.stdout.splitlines()[-1].endswith("Not found, so not looked at: nats, redis, gateway.")


def test_system_that_was_killed_is_one_cause_and_told_at_once(tmp_path: Path) -> None:
    gone, nowhere = 2**22 + 1, "nats://127.0.0.1:1"
    pids = {"nats": [gone], "gateway": [gone + 1]}
    url = "http://127.0.0.1:1"
    write_ready_file(tmp_path / "ready.json", ReadyFile(url, "k", nowhere, nowhere, None, url, "o", pids))
    (tmp_path / "lock").write_text(str(gone))
    done = headrace("doctor", "--state-dir", str(tmp_path))
    assert (done.returncode, re.findall(r"^(?:FAIL|WARN) +(\w+)", done.stdout, re.MULTILINE)) == (1, ["state"])
    assert f"the `headrace up` of {tmp_path} was killed, with all its parts" in done.stdout
    for command in (["usage"], ["chat", "x"], ["publish", "x"], ["dead", "list"]):
        place = ["--state-dir", str(tmp_path)]
        done = headrace(command[0], *place, *command[1:]) if command[0] == "dead" else headrace(*command, *place)
        assert (done.returncode, done.stderr) == (2, f"headrace: no `headrace up` runs on {tmp_path}; start it\n")


def test_gateway_that_is_named_is_looked_at_without_nats(tmp_path: Path) -> None:
    done = headrace("doctor", "--state-dir", str(tmp_path), "--url", "http://127.0.0.1:1")
    assert "FAIL  gateway" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("Not found, so not looked at: nats, redis.")


def test_verdict_says_what_it_does_not_cover() -> None:
    none = unseen("nats", "none is named")
    assert verdict([none]) == "Nothing is wrong in what was looked at. Not found, so not looked at: nats."
    assert verdict([none, problem("a", "is bad")]) == "1 problem. Not found, so not looked at: nats."
    assert verdict([Finding("a", "is good")]) == "Nothing is wrong."


def test_verdict_counts() -> None:
    text = page([problem("a", "is bad", "mend it"), warning("bb", "is so-so")], str)
    assert text.splitlines() == [
        "FAIL  a   is bad",
        "          -> mend it",
        "warn  bb  is so-so",
        "",
        "1 problem, 1 warning.",
    ]


def test_worker_that_could_serve_passes_its_check_and_does_not_join(nats_url: str) -> None:
    options = ["--model", str(DEMO_MODEL), "--nats-url", nats_url, "--served-model-name", "checked"]
    done = headrace("worker", "--check", *options)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    for topic in ("model", "device", "weights", "sizes", "nats rights", "revision"):
        assert re.search(rf"^ok +{topic} ", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize(
    ("options", "topic", "words"),
    [
        (["--model", "/nowhere"], "model", "--model: /nowhere does not exist; name a folder"),
        pytest.param(
            *(["--model", str(DEMO_MODEL), "--device", "cuda"], "device", "cuda is asked for"), marks=pytest.mark.slow
        ),
        ([], "model", "none is named"),
        (["--model", str(DEMO_MODEL), "--num-blocks", "99999999"], "sizes", "a KV cache of 99999999 blocks needs"),
        pytest.param(
            *(["--model", str(DEMO_MODEL), "--max-model-len", "9999"], "sizes", "the model was made for 2048 tokens"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(["--model", str(DEMO_MODEL), "--speculative", "draft"], "sizes", "--draft-model: is needed"),
            marks=pytest.mark.slow,
        ),
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


@pytest.mark.parametrize(
    ("cluster", "level", "told"),
    [
        ({}, Level.FINE, "5 wait"),
        ({"leader": "a"}, Level.FINE, "5 wait"),
        (
            {"leader": "a", "replicas": [{"name": "b"}, {"name": "c"}]},
            Level.FINE,
            "5 wait; kept by 3 servers, led by a",
        ),
        ({"replicas": [{"name": "b"}, {"name": "c"}]}, Level.WARNING, "kept by 3 servers, none of which leads"),
        ({"leader": "a", "replicas": [{"name": "b", "offline": True}]}, Level.WARNING, "led by a; away: b"),
    ],
)
def test_who_keeps_the_queue_is_told_of_a_cluster(cluster: dict[str, Any], level: Level, told: str) -> None:
    found = cluster_finding(cluster, "5 wait")
    assert (found.level, told in found.text) == (level, True)
