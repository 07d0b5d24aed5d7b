import hashlib
import json
import re
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gateway.admission.api_keys import MAX_LIMIT
from ops.stack.state import StateDirectory
from tests.integration.system import System
from tests.ops.cli.command import headrace as headrace_outside
from tests.ops.cli.command import headrace_here as headrace


def test_created_key_is_printed_once_and_kept_only_as_a_hash(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    options = ["--tenant", "acme", "--allow-model", "a", "--allow-model", "b", "--requests-per-minute", "60"]
    options += ["--reads-per-minute", "30", "--max-priority", "7", "--weight", "2.5"]
    done = headrace("keys", "--keys-file", str(file), "create", *options)
    assert done.returncode == 0, done.stderr
    key = done.stdout.strip()
    (record,) = json.loads(file.read_text())
    assert record["sha256"] == hashlib.sha256(key.encode()).hexdigest()
    assert (record["tenant"], record["models"], record["requests_per_minute"]) == ("acme", ["a", "b"], 60)
    assert (record["reads_per_minute"], record["max_priority"], record["weight"]) == (30, 7, 2.5)
    assert key not in file.read_text()


@pytest.mark.parametrize("name", ["requests-per-minute", "tokens-per-minute", "max-concurrent", "reads-per-minute"])
def test_limit_that_no_gateway_can_count_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "keys.json"
    done = headrace("keys", "--keys-file", str(file), "create", f"--{name}", str(MAX_LIMIT + 1))
    assert done.returncode == 2
    assert f"--{name}" in done.stderr
    assert not file.exists()
    done = headrace("keys", "--keys-file", str(file), "create", f"--{name}", str(MAX_LIMIT))
    assert done.returncode == 0, done.stderr
    assert json.loads(file.read_text())[0][name.replace("-", "_")] == MAX_LIMIT


def test_keys_are_listed_and_revoked_by_id(tmp_path: Path) -> None:
    variable = {"HEADRACE_KEYS_FILE": str(tmp_path / "keys.json")}
    key = headrace("keys", "create", "--name", "laptop", **variable).stdout.strip()
    listed = headrace("keys", "list", **variable).stdout
    key_id = listed.splitlines()[1].split()[0]
    assert "laptop" in listed
    assert key not in listed
    headrace("keys", "limit", "default", "--max-concurrent", "9", **variable)
    told = headrace("keys", "list", "--json", **variable).stdout
    of_key, of_tenant = map(json.loads, told.splitlines())
    assert (of_key["id"], of_key["name"], of_key["weight"], of_key["revoked"]) == (key_id, "laptop", 1.0, None)
    assert (of_tenant["tenant"], of_tenant["max_concurrent"]) == ("default", 9)
    assert hashlib.sha256(key.encode()).hexdigest() not in told
    assert "is revoked" in headrace("keys", "revoke", key_id, **variable).stdout
    (record,) = json.loads((tmp_path / "keys.json").read_text())
    assert record["revoked"] > record["created"]


def test_keys_are_changed_rotated_and_revoked_by_name_and_tenants_limited(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    variable = {"HEADRACE_KEYS_FILE": str(file), "HEADRACE_AUDIT_FILE": str(tmp_path / "audit.jsonl")}
    headrace("keys", "create", "--name", "laptop", "--requests-per-minute", "5", "--expires", "30d", **variable)
    done = headrace("keys", "update", "laptop", "--requests-per-minute", "0", "--max-concurrent", "4", **variable)
    assert "is changed" in done.stdout, done.stderr
    done = headrace("keys", "update", "laptop", "--expires", "2099-01-31", "--weight", "4", **variable)
    (record,) = json.loads(file.read_text())
    assert ("requests_per_minute" in record, record["max_concurrent"], record["expires"]) == (False, 4, 4073500800)
    assert record["weight"] == 4.0
    done = headrace("keys", "rotate", "laptop", "--overlap", "10m", **variable)
    old, new = json.loads(file.read_text())
    assert new["weight"] == 4.0
    assert new["sha256"] == hashlib.sha256(done.stdout.strip().encode()).hexdigest()
    assert old["expires"] - time.time() < 601
    told = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(old["expires"]))
    assert f"{old['id']}, the old key, opens until {told} UTC" in done.stderr
    done = headrace("keys", "limit", "default", "--max-concurrent", "9", **variable)
    assert f"tenant default: 9 max concurrent, kept in {tmp_path / 'tenants.json'}" in done.stdout
    listed = headrace("keys", "list", **variable).stdout
    assert "2099-01-31" in listed
    assert "WEIGHT" in listed
    assert re.search(r"TENANT +REQ/MIN +TOK/MIN +CONCURRENT\ndefault +- +- +9", listed)
    told = headrace("keys", "revoke", "laptop", **variable).stdout
    assert told == (
        f"{new['id']} of tenant default is revoked\n"
        f"{old['id']} (laptop (rotated)), which it replaced and which still opened, is revoked too\n"
    )
    assert all("revoked" in record for record in json.loads(file.read_text()))
    actions = [json.loads(line)["action"] for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert actions == [f"keys.{each}" for each in ("create", "update", "update", "rotate", "limit", "revoke")]


def test_what_makes_a_useless_key_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    keys = ["keys", "--keys-file", str(file)]
    headrace(*keys, "create", "--name", "a")
    before = file.read_text()
    for command, message in (
        (["create", "--expires", "2020-01-01"], "'2020-01-01' is past"),
        (["update", "a", "--allow-model", ""], "a model's name is empty"),
        (["rotate", "a", "--overlap", "never"], "the old key ends some time"),
        (["rotate", "a", "--overlap", "5s"], "12h, 90m, a day such as 2027-01-31\n"),
        (["rotate", "a", "--overlap", "0m"], "`headrace keys revoke` ends a key now"),
        (["create", "--name", "a"], "the name 'a' means key_"),
        (["revoke", ""], "name a key by its id or name"),
        (["create", "a1"], "Did you mean '--name a1'?"),
        (["add"], "Did you mean 'create'?"),
    ):
        done = headrace(*keys, *command)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert file.read_text() == before


def test_key_that_is_revoked_already_is_told_with_the_time(tmp_path: Path) -> None:
    keys = ["keys", "--keys-file", str(tmp_path / "keys.json")]
    headrace(*keys, "create", "--name", "b1")
    headrace(*keys, "revoke", "b1")
    (record,) = json.loads((tmp_path / "keys.json").read_text())
    when = datetime.fromtimestamp(record["revoked"], UTC).strftime("%Y-%m-%d at %H:%M UTC")
    done = headrace(*keys, "revoke", "b1")
    assert (done.returncode, done.stdout) == (0, f"{record['id']} (b1) of tenant default was revoked on {when}\n")
    for change in (["rotate", "b1"], ["update", record["id"], "--max-concurrent", "2"]):
        done = headrace(*keys, *change)
        assert (done.returncode, done.stdout) == (2, "")
        told = f"{record['id']} (b1) of tenant default was revoked on {when}; `headrace keys create` makes a new key"
        assert told in done.stderr
    assert json.loads((tmp_path / "keys.json").read_text()) == [record]


def test_limits_of_a_tenant_without_a_key_are_kept_with_a_note(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    keys = ["keys", "--keys-file", str(file)]
    headrace(*keys, "create", "--tenant", "acme")
    done = headrace(*keys, "limit", "acmee", "--max-concurrent", "3")
    assert (done.returncode, done.stderr) == (0, f"note: no key in {file} is of tenant acmee\n")
    assert headrace(*keys, "limit", "acme", "--max-concurrent", "3").stderr == ""


def test_help_says_bounds_and_kinds_as_other_commands_do() -> None:
    told = " ".join(headrace("keys", "update", "--help").stdout.split())
    assert "Requests a minute over all gateways; 0 takes the limit away." in told
    assert "-100 to 100" in told
    assert "RANGE" not in told


def test_list_says_when_there_is_no_key_file(tmp_path: Path) -> None:
    done = headrace("keys", "--keys-file", str(tmp_path / "none.json"), "list")
    assert (done.returncode, done.stdout.count("\n"), done.stderr.count("\n")) == (0, 1, 1)
    assert f"there is no {tmp_path / 'none.json'} yet" in done.stderr


def test_key_made_beside_a_running_system_opens_it(state_dir: Path, cli_system: System) -> None:
    key = headrace("keys", "--keys-file", str(state_dir / "keys.json"), "create").stdout.strip()
    deadline = time.monotonic() + 60
    while (done := headrace_outside("chat", "x", "--url", cli_system.url + "/v1", "--api-key", key)).returncode != 0:
        assert time.monotonic() < deadline, done.stderr


def test_keys_and_the_audit_log_lie_beside_each_other_where_the_system_is(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    place, here = str(tmp_path / "s"), tmp_path / "here"
    assert headrace("keys", "--state-dir", place, "create", cwd=here, HEADRACE_AUDIT_FILE="").returncode == 0
    done = headrace("keys", "create", cwd=here, HEADRACE_AUDIT_FILE="", HEADRACE_STATE_DIR=place)
    assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "s" / "keys.json").read_text())) == 2
    assert len((tmp_path / "s" / "audit.jsonl").read_text().splitlines()) == 2
    file = tmp_path / "system" / "keys.json"
    done = headrace("keys", "--keys-file", str(file), "create", cwd=here, HEADRACE_AUDIT_FILE="")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "system" / "audit.jsonl").read_text())["action"] == "keys.create"
    assert list(here.iterdir()) == []


def test_creating_and_revoking_a_key_is_in_the_audit_log_without_the_key(tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    variables = {"HEADRACE_KEYS_FILE": str(tmp_path / "keys.json"), "HEADRACE_AUDIT_FILE": str(audit)}
    key = headrace("keys", "create", "--tenant", "acme", "--name", "a\nb", **variables).stdout.strip()
    (record,) = json.loads((tmp_path / "keys.json").read_text())
    headrace("keys", "revoke", record["id"], **variables)
    headrace("keys", "revoke", "key_none", **variables)
    headrace("keys", "list", **variables)
    assert key not in audit.read_text()
    assert record["sha256"] not in audit.read_text()
    created, revoked, failed = map(json.loads, audit.read_text().splitlines())
    assert (created["action"], created["what"]["key"]) == ("keys.create", record["id"])
    assert created["what"]["tenant"] == "acme"
    assert (revoked["action"], revoked["outcome"], revoked["what"]["key"]) == ("keys.revoke", "done", record["id"])
    assert (failed["outcome"], "key_none" in failed["error"]) == ("failed", True)


def test_key_is_not_made_when_the_audit_log_cannot_be_written(tmp_path: Path) -> None:
    variables = {"HEADRACE_KEYS_FILE": str(tmp_path / "keys.json"), "HEADRACE_AUDIT_FILE": str(tmp_path)}
    done = headrace("keys", "create", **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert "HEADRACE_AUDIT_FILE" in done.stderr
    assert not (tmp_path / "keys.json").exists()


def test_first_key_is_made_only_where_there_is_none(tmp_path: Path) -> None:
    variable = {"HEADRACE_KEYS_FILE": str(tmp_path / "keys.json")}
    assert headrace("keys", "create", "--first", **variable).stdout.startswith("hr-")
    again = headrace("keys", "create", "--first", **variable)
    assert (again.returncode, again.stdout, again.stderr.count("\n")) == (0, "", 1)
    assert len(json.loads((tmp_path / "keys.json").read_text())) == 1


def test_key_file_of_a_state_directory_that_no_system_has_used_is_told(tmp_path: Path) -> None:
    state = {"HEADRACE_STATE_DIR": str(tmp_path / "state")}
    first, second = (headrace("keys", "create", **state) for _ in range(2))
    assert first.stdout.startswith("hr-")
    made = f"{tmp_path / 'state' / 'keys.json'} is made for one that will\n"
    assert first.stderr.startswith(f"no `headrace up` has run with {tmp_path / 'state'}: {made}")
    assert "no `headrace up`" not in second.stderr


def test_first_key_of_a_system_that_runs_is_made_without_a_warning(tmp_path: Path) -> None:
    running = StateDirectory(tmp_path)
    try:
        done = headrace("keys", "create", HEADRACE_STATE_DIR=str(tmp_path))
    finally:
        running.close()
    assert done.stdout.startswith("hr-")
    assert re.fullmatch(rf"id \w+, tenant default, kept in {re.escape(str(running.keys_file))}\n", done.stderr)
