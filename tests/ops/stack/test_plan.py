import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ops.stack import plan as plan_module
from ops.stack.config import UpConfig
from ops.stack.plan import ModelChoice, NatsAccess, Plan, _redis_text, make_plan, missing_role
from ops.stack.ports import free_port
from ops.stack.run import banner
from ops.stack.servers import find_redis_server
from ops.stack.state import StateDirectory
from shared.config import resolve
from shared.errors import ConfigError

Make = Callable[..., Plan]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def plan(environ: dict[str, str] | None = None, models: Sequence[ModelChoice] = (), **values: object) -> Plan:
        environ = environ or {}
        state = StateDirectory(tmp_path / "state")
        try:
            return make_plan(resolve(UpConfig, {"port": 0, **values}, environ), state, environ, models)
        finally:
            state.close()

    return plan


def test_each_child_gets_only_the_password_of_its_role(make: Make) -> None:
    plan = make(workers=2)
    assert plan.nats is not None
    passwords = {role: plan.nats.environ[f"HEADRACE_NATS_{role.upper()}_PASSWORD"] for role in ("gateway", "worker")}
    assert len(set(passwords.values())) == 2
    for spec in (plan.gateway, *plan.workers):
        others = {value for role, value in passwords.items() if role != spec.role}
        assert spec.environ["HEADRACE_NATS_USER"] == spec.role
        assert spec.environ["HEADRACE_NATS_PASSWORD"] == passwords[spec.role]
        assert others & set(spec.environ.values()) == set()


def test_who_asks_for_no_key_is_told_so(make: Make) -> None:
    note = "(--no-auth: only web pages need it)"
    assert note not in banner(make(), "m", is_demo=False)
    assert note in banner(make({"HEADRACE_AUTH": "false"}), "m", is_demo=False)


def test_no_secret_is_on_a_command_line(make: Make) -> None:
    plan = make(api_key="hr-secret")
    assert plan.nats is not None
    assert plan.redis is not None
    assert plan.redis_url is not None
    redis_password = plan.redis_url.split(":")[2].split("@")[0]
    secrets = {value for name, value in plan.nats.environ.items() if name.endswith("_PASSWORD")}
    secrets |= {"hr-secret", redis_password}
    for spec in (plan.nats, plan.redis, plan.gateway, *plan.workers):
        assert not [word for word in spec.command for secret in secrets if secret in word]
    file = Path(plan.redis.command[-1])
    assert redis_password in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_nats_password_cannot_be_read_as_a_number(make: Make) -> None:
    plan = make()
    assert re.fullmatch(r"p[0-9a-f]{32}", plan.admin.password or "")


def test_settings_of_the_parts_pass_through_and_ours_do_not(make: Make) -> None:
    plan = make({"HEADRACE_MAX_NUM_SEQS": "7", "HEADRACE_WORKERS": "3", "HEADRACE_CACHE_TTL_S": "1", "PATH": "/bin"})
    assert len(plan.workers) == 3
    for worker in plan.workers:
        assert (worker.environ["HEADRACE_MAX_NUM_SEQS"], worker.environ["PATH"]) == ("7", "/bin")
        assert "HEADRACE_WORKERS" not in worker.environ
    assert plan.gateway.environ["HEADRACE_CACHE_TTL_S"] == "1"


def test_names_and_the_operators_port_are_those_that_were_chosen(make: Make) -> None:
    port = free_port()
    chosen = {"HEADRACE_OPERATOR_PORT": str(port), "HEADRACE_OPERATOR_WITHOUT_KEY": "true", "HEADRACE_WORKER_ID": "w"}
    plan = make(chosen, workers=2)
    assert (plan.operator_url, plan.operator_key) == (f"http://127.0.0.1:{port}", "")
    assert [worker.environ["HEADRACE_WORKER_ID"] for worker in plan.workers] == ["w-0", "w-1"]
    assert make(chosen).workers[0].environ["HEADRACE_WORKER_ID"] == "w"


def test_roles_go_to_the_workers_in_turns(make: Make) -> None:
    plan = make(workers=3, roles="prefill, decode")
    assert [worker.environ["HEADRACE_ROLE"] for worker in plan.workers] == ["prefill", "decode", "prefill"]
    assert "HEADRACE_ROLE" not in make(workers=2).workers[0].environ
    with pytest.raises(ConfigError, match=r"HEADRACE_ROLES: names 'decoder'; a role is one of prefill, decode, both"):
        make(roles="prefill,decoder")
    with pytest.raises(ConfigError, match="HEADRACE_ROLES: does not go with --simulate"):
        make(roles="prefill,decode", workers=2, simulate=5.0)


@pytest.mark.parametrize(
    ("workers", "roles", "missing"),
    [
        (2, "prefill", "decode"),
        (1, "prefill,decode", "decode"),
        (2, "decode", "prefill"),
        (2, "prefill,decode", None),
        (2, "prefill,both", None),
        (2, None, None),
    ],
)
def test_role_that_nobody_has_is_told(workers: int, roles: str | None, missing: str | None) -> None:
    told = missing_role(UpConfig(workers=workers, roles=roles))
    assert told is None if missing is None else f"there is no {missing} worker" in str(told)


def test_no_two_servers_of_a_start_get_one_port(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    start = free_port(4)
    choices = (start + number // 4 for number in range(100))
    monkeypatch.setattr("ops.stack.ports.random.choice", lambda _: next(choices))
    plan = make()
    assert plan.redis_url is not None
    urls = (plan.url, plan.operator_url, plan.admin.url, plan.redis_url.removesuffix("/0"))
    assert sorted(int(url.rpartition(":")[2]) for url in urls) == list(range(start, start + 4))


def test_setting_of_a_part_that_cannot_be_used_is_refused_before_anything_starts(make: Make) -> None:
    with pytest.raises(ConfigError, match="HEADRACE_SPECULATIVE: 'guess' is not one of"):
        make({"HEADRACE_SPECULATIVE": "guess"})


def test_several_workers_share_the_cores_unless_told_otherwise(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module.os, "cpu_count", lambda: 8)
    assert "HEADRACE_NUM_THREADS" not in make().workers[0].environ
    assert make(workers=3).workers[0].environ["HEADRACE_NUM_THREADS"] == "2"
    assert make({"HEADRACE_NUM_THREADS": "5"}, workers=3).workers[0].environ["HEADRACE_NUM_THREADS"] == "5"


def test_system_runs_without_redis_where_there_is_none(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "find_redis_server", lambda: None)
    plan = make()
    assert (plan.redis, plan.redis_url) == (None, None)
    assert plan.gateway.environ["HEADRACE_REDIS_URL"] == ""


def test_given_nats_is_used_in_every_role_and_not_run(make: Make) -> None:
    plan = make(nats_url="nats://n:1", nats_user="u", nats_password="p")
    assert plan.nats is None
    assert plan.admin == plan.batch == NatsAccess("nats://n:1", "u", "p")
    assert plan.workers[0].environ["HEADRACE_NATS_URL"] == "nats://n:1"


def test_files_of_a_given_nats_reach_the_children(make: Make, tmp_path: Path) -> None:
    plan = make(nats_url="tls://n:1", nats_creds_file="some.creds", nats_ca_file=str(tmp_path / "ca.pem"))
    for child in (plan.gateway, *plan.workers):
        assert child.environ["HEADRACE_NATS_CREDS_FILE"] == str(Path("some.creds").absolute())
        assert child.environ["HEADRACE_NATS_CA_FILE"] == str(tmp_path / "ca.pem")


def test_files_of_another_nats_are_hidden_from_the_children(make: Make) -> None:
    plan = make({"HEADRACE_NATS_CREDS_FILE": "other.creds"})
    assert {child.environ["HEADRACE_NATS_CREDS_FILE"] for child in (plan.gateway, *plan.workers)} == {""}


def test_credentials_are_escaped_in_the_url() -> None:
    assert NatsAccess("nats://h:1", "a@b", "c/d:e").full_url == "nats://a%40b:c%2Fd%3Ae@h:1"


def test_every_server_of_a_url_gets_the_credentials() -> None:
    assert NatsAccess("tls://a:1, b:2", "u", "p").full_url == "tls://u:p@a:1,nats://u:p@b:2"


def test_gateway_has_its_drain_time_before_it_is_killed_and_workers_follow(make: Make) -> None:
    plan = make(drain_timeout_s=20)
    assert float(plan.gateway.environ["HEADRACE_DRAIN_TIMEOUT_S"]) == 20 < plan.gateway.stop_timeout_s
    assert float(plan.workers[0].environ["HEADRACE_DRAIN_TIMEOUT_S"]) < plan.workers[0].stop_timeout_s


def test_children_write_to_the_audit_log_of_the_state_directory_unless_told_otherwise(make: Make) -> None:
    plan = make()
    files = {spec.environ["HEADRACE_AUDIT_FILE"] for spec in (plan.gateway, *plan.workers)}
    assert {Path(file).name for file in files} == {"audit.jsonl"}
    assert make({"HEADRACE_AUDIT_FILE": "/x"}).gateway.environ["HEADRACE_AUDIT_FILE"] == "/x"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("name", ["a 'b' \"c\" $HOME", "back\\slash", "new\nline", "Größe"])
def test_redis_reads_any_folder_of_its_configuration(name: str, tmp_path: Path) -> None:
    folder, file = tmp_path / name, tmp_path / "redis.conf"
    folder.mkdir()
    file.write_text(f"port 0\nunixsocket {tmp_path}/s\ndir {_redis_text(folder)}\ndbfilename here\n")
    binary = find_redis_server()
    assert binary is not None
    with subprocess.Popen([binary, str(file)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        # At the wrong place it would not begin, or it would look for its data elsewhere.
        assert any("eady to accept connections" in line for line in process.stdout)
        assert Path(f"/proc/{process.pid}/cwd").resolve() == folder
        process.kill()


def test_each_of_several_models_has_its_workers(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    models = [ModelChoice(tmp_path / "a"), ModelChoice(tmp_path / "b", "org/b")]
    plan = make({"HEADRACE_WORKER_ID": "w"}, models, workers=2)
    names = ("MODEL", "SERVED_MODEL_NAME", "WORKER_ID", "NUM_THREADS")
    found = [tuple(spec.environ.get(f"HEADRACE_{name}") for name in names) for spec in plan.workers]
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert found == [(a, None, "w-0", "2"), (a, None, "w-1", "2"), (b, "org/b", "w-2", "2"), (b, "org/b", "w-3", "2")]
