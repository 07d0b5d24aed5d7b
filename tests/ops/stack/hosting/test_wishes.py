"""Orders are checked where they are carried out: paths, options and memory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ops.stack.config import DEMO_MODEL, HostSettings
from ops.stack.hosting.wishes import OrderError, Wish, Wishes
from shared.config import resolve
from shared.errors import ConfigError
from shared.hosted_models import ModelOrder
from shared.messages import encode


@pytest.fixture
def models(tmp_path: Path) -> Path:
    directory = tmp_path / "models"
    directory.mkdir()
    for name in ("a", "b"):
        (directory / name).mkdir()
        shutil.copy(DEMO_MODEL / "config.json", directory / name)
        (directory / name / "model.safetensors").write_bytes(b"0" * 1000)
    return directory


def wishes(models: Path | None, **settings: Any) -> Wishes:
    values = {"models_dir": None if models is None else str(models), **settings}
    file = (Path("/nowhere") if models is None else models.parent) / "models.json"
    return Wishes(resolve(HostSettings, values, {}), file)


def load(name: str = "m", path: str = "a", **fields: Any) -> ModelOrder:
    return ModelOrder(action="load", name=name, path=path, **fields)


def test_what_was_loaded_is_there_after_a_restart(models: Path) -> None:
    before = wishes(models)
    before.load(load(on_demand=True, idle_s=7.0, options={"max_num_seqs": "3"}))
    before.replace(load(path=str(models / "b")))
    found = wishes(models).get("m")
    assert found == before.get("m")
    assert found is not None
    assert (found.path, found.generation, found.need_bytes) == (str(models / "b"), 1, 1000 + (512 << 20))


@pytest.mark.parametrize("name", ["a b", "a\tb", "a\u00a0b", "a\u202eb", "\n", "..", "x" * 129])
def test_name_that_people_could_not_type_or_read_is_refused(models: Path, name: str) -> None:
    with pytest.raises(OrderError, match=r"^name: '.*' must "):
        wishes(models).load(load(name))


def test_model_that_has_such_a_name_already_can_be_replaced(models: Path) -> None:
    (models.parent / "models.json").write_bytes(msgspec.json.encode([Wish(name="a b", path=str(models / "a"))]))
    host = wishes(models)
    host.replace(load("a b", "b"))
    found = host.get("a b")
    assert found is not None
    assert found.path == str(models / "b")


@pytest.mark.parametrize("path", ["loop", "x" * 256, "x/" * 2048, "dangling"])
def test_path_that_cannot_be_read_is_refused(models: Path, path: str) -> None:
    (models / "loop").symlink_to(models / "pool")
    (models / "pool").symlink_to(models / "loop")
    shutil.copytree(models / "a", models / "dangling")
    (models / "dangling" / "model.safetensors").unlink()
    (models / "dangling" / "model.safetensors").symlink_to(models / "nothing")
    with pytest.raises(OrderError, match=r"^(path: |HEADRACE_)"):
        wishes(models).load(load(path=path))


@pytest.mark.parametrize(
    "path", ["/etc", "..", "a/../..", "../models/../other", ".", "", "link", "a/\0b", "/proc/self/root"]
)
def test_path_outside_the_allowed_directories_is_refused(models: Path, path: str) -> None:
    outside = models.parent / "other"
    shutil.copytree(models / "a", outside)
    (models / "link").symlink_to(outside)
    itself = "'.*' is the directory of models itself" if path in (".", "") else "'.*' is not under a directory"
    with pytest.raises(OrderError, match=rf"^path: ({itself}|must not contain a NUL)"):
        wishes(models).load(load(path=path))


def test_several_directories_may_be_allowed_and_each_must_be_one(models: Path) -> None:
    (other := models.parent / "other").mkdir()
    wishes(models, models_dir=f" {other} , {models},").load(load(path=str(models / "a")))
    with pytest.raises(ConfigError, match=r"/missing is not a directory$"):
        wishes(models, models_dir=f"{models},{models}/missing")


def test_without_directories_nothing_is_loaded() -> None:
    with pytest.raises(OrderError, match="start it with --models-dir"):
        wishes(None).load(load())


@pytest.mark.parametrize("name", ["model", "nats_url", "audit_file", "lora_modules", "kv_disk_path", "x"])
def test_options_that_name_files_or_addresses_are_refused(models: Path, name: str) -> None:
    with pytest.raises(OrderError, match=f"^options: '{name}' is not one of "):
        wishes(models).load(load(options={name: "/etc/passwd"}))


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        (load(options={"max_num_seqs": "many"}), "^--option max_num_seqs: 'many' is not a whole number"),
        (load(path="c"), "^path: .*does not exist"),
        (load(name="m\0"), "must not contain a NUL"),
        (ModelOrder(action="load", name="m"), "^path: name the directory"),
    ],
)
def test_order_that_cannot_work_is_refused_with_the_reason(models: Path, order: ModelOrder, problem: str) -> None:
    with pytest.raises(OrderError, match=problem):
        wishes(models).load(order)


def test_what_can_never_fit_is_refused_and_what_can_take_turns_is_not(models: Path) -> None:
    host = wishes(models, host_memory_bytes=1000)
    with pytest.raises(OrderError, match=r"m needs 1\.2e-06 GB, and of the host's 1e-06 GB 1e-06 GB are left"):
        host.load(load(memory_bytes=1200))
    host.load(load("one", memory_bytes=700, on_demand=True))
    host.load(load("two", memory_bytes=700, on_demand=True))
    with pytest.raises(OrderError, match="unload a model"):
        host.replace(load("two", memory_bytes=700))  # not beside itself
    host.load(load("always", memory_bytes=200))
    with pytest.raises(OrderError, match="unload a model"):
        host.load(load("three", memory_bytes=900, on_demand=True))


def test_memory_that_is_counted_is_what_the_worker_gets(models: Path) -> None:
    host = wishes(models, host_memory_bytes=2 << 30)
    host.load(load())
    wish = host.get("m")
    assert wish is not None
    assert wish.environ["HEADRACE_KV_CACHE_BYTES"] == str(512 << 20)


def test_unknown_and_repeated_names_are_refused(models: Path) -> None:
    host = wishes(models)
    host.load(load())
    with pytest.raises(OrderError, match="is loaded already"):
        host.load(load())
    with pytest.raises(OrderError, match="'x' is not loaded on this host; loaded: m"):
        host.unload("x")
    host.unload("m")
    assert host.wanted() == {}


def test_orders_about_models_that_others_start_are_not_kept(models: Path) -> None:
    before = wishes(models)
    before.load(load("kept"))
    before.load(load("m"))
    # The next start is given a model of that name.
    host = wishes(models)
    host.adopt([Wish(name="m", path="/started", workers=2)])
    assert host.known("m").path == "/started"
    host.replace(load(path="b"))
    assert (host.known("m").generation, host.known("m").path) == (1, str(models / "b"))
    host.load(load("new"))
    assert sorted(wish.name for wish in wishes(models)) == ["kept", "new"]


def test_generation_of_a_replacement_that_was_undone_is_not_given_to_the_next(models: Path) -> None:
    """A worker of the one that was undone may still run, and would count as one of the next."""
    host = wishes(models)
    host.load(load())
    host.replace(load(path="b"))
    assert host.restore("m")
    assert not host.restore("m")
    assert host.known("m").generation == 0
    host.replace(load(path="b"))
    assert host.known("m").generation == 2


def test_model_that_is_loaded_again_after_a_restart_of_the_host_has_a_new_generation(models: Path) -> None:
    """A worker of the one that was unloaded may still run."""
    wishes(models).load(load())
    host = wishes(models)
    host.unload("m")
    host.load(load(path="b"))
    assert host.known("m").generation == 1


@pytest.mark.parametrize("damaged", [b"[{}]", b'[{"name": "m', b'[{"name": "\xff"}]', b""])
def test_damaged_list_names_its_file_and_the_way_out(models: Path, damaged: bytes) -> None:
    (models.parent / "models.json").write_bytes(damaged)
    with pytest.raises(
        ConfigError, match=r"models\.json is no list of models \(.+\); copy it from a backup, or move it"
    ):
        wishes(models)


def test_replaced_model_keeps_what_is_not_given(models: Path) -> None:
    host = wishes(models)
    host.load(load(on_demand=True, idle_s=7.0, workers=2, memory_bytes=5000, options={"max_num_seqs": "3"}))
    host.replace(load(path="b"))
    kept = host.get("m")
    assert kept is not None
    assert (kept.on_demand, kept.idle_s, kept.workers, kept.need_bytes) == (True, 7.0, 2, 5000)
    assert kept.options == {"max_num_seqs": "3"}
    host.replace(load(on_demand=False, workers=1, memory_bytes=6000, options={"dtype": "float32"}))
    given = host.get("m")
    assert given is not None
    assert (given.on_demand, given.workers, given.need_bytes) == (False, 1, 6000)
    assert given.options == {"max_num_seqs": "3", "dtype": "float32"}


def test_memory_of_a_replacement_is_estimated_anew_where_it_was_estimated(models: Path) -> None:
    (models / "b" / "model.safetensors").write_bytes(b"0" * 3000)
    host = wishes(models)
    host.load(load())
    host.replace(load(path="b"))
    assert host.wanted()["m"].need_bytes == 3000 + (512 << 20)


def test_idle_time_of_a_model_that_never_sleeps_is_refused(models: Path) -> None:
    host = wishes(models)
    with pytest.raises(OrderError, match=r"^idle_s: "):
        host.load(load(idle_s=5.0))
    host.load(load(on_demand=True))
    host.replace(load(idle_s=5.0))
    assert host.wanted()["m"].idle_s == 5.0


def test_order_says_nothing_of_what_is_not_given() -> None:
    """A host of the version before knows no null."""
    sent = msgspec.msgpack.decode(encode(load()))
    assert sent == {"type": "model_order", "action": "load", "name": "m", "path": "a"}


def test_estimated_kv_cache_is_not_kept_as_if_it_had_been_ordered(models: Path) -> None:
    host = wishes(models, host_memory_bytes=4 << 30)
    host.load(load(options={"max_num_seqs": "3"}))
    estimated = host.get("m")
    assert estimated is not None
    assert estimated.environ == {"HEADRACE_MAX_NUM_SEQS": "3", "HEADRACE_KV_CACHE_BYTES": str(512 << 20)}
    # An empty value says the default again.
    host.replace(load(path="b", memory_bytes=1 << 30, options={"max_num_seqs": ""}))
    ordered = host.get("m")
    assert ordered is not None
    assert ordered.environ == {}
