from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.models.revision import model_revision
from gpu_worker.start.assembly import Identity
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.model_revision import revision_difference, served_revision
from gpu_worker.start.nats_check import check_nats
from shared.errors import ConfigError
from shared.messages import Heartbeat
from shared.nats_connection import connect
from shared.streams import StreamLimits, ensure_interactive_stream
from shared.subjects import worker_subject


@contextlib.asynccontextmanager
async def beating(nats_url: str, model: str, revision: str, *, draining: bool = False) -> AsyncIterator[None]:
    """A worker that sends heartbeats."""
    client = await connect(nats_url, role="worker", name="other")
    heartbeat = Heartbeat(
        worker="other", model=model, step=0, running=0, waiting=0, waiting_tokens=0, free_blocks=1, total_blocks=1,
        block_size=16, max_model_len=64, max_num_seqs=1, prefill_rate=0, decode_rate=0, queue_pending=0,
        revision=revision, draining=draining,
    )  # fmt: skip

    async def beat() -> None:
        while True:
            await client.publish(worker_subject(model, "other"), msgspec.msgpack.encode(heartbeat))
            await asyncio.sleep(0.05)

    beats = asyncio.create_task(beat())
    try:
        yield
    finally:
        beats.cancel()
        await client.close()


async def join(nats_url: str, model: str, revision: str, **settings: bool) -> None:
    config = WorkerConfig(model=Path("m"), nats_url=nats_url, **settings)
    await asyncio.to_thread(check_nats, config, Identity("new", model, revision))


async def test_another_revision_under_the_same_name_is_refused_unless_allowed(nats_url: str) -> None:
    async with beating(nats_url, "check-a", "rev1"):
        await join(nats_url, "check-a", "rev1")
        await join(nats_url, "check-b", "rev2")
        with pytest.raises(ConfigError, match=r"worker other serves another revision of 'check-a' \(rev1; this one is"):
            await join(nats_url, "check-a", "rev2")
        await join(nats_url, "check-a", "rev2", allow_revision_change=True)


async def test_clock_that_is_wrong_is_told_before_the_model_is_loaded(
    nats_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await connect(nats_url, role="worker", name="other")
    await ensure_interactive_stream(client.jetstream(), StreamLimits())
    await client.close()
    await join(nats_url, "clocks", "r")
    assert "clock" not in caplog.text
    wrong = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: wrong)
    await join(nats_url, "clocks", "r")
    assert re.search(r"this machine's clock is 3(599|600)\.\d+ s ahead of NATS: set both", caplog.text)


async def test_worker_that_drains_does_not_keep_its_successor_out(nats_url: str) -> None:
    async with beating(nats_url, "check-c", "rev1", draining=True):
        await join(nats_url, "check-c", "rev2")


async def test_worker_whose_name_is_taken_is_refused_until_the_other_has_ended(nats_url: str) -> None:
    async def join_as_other() -> None:
        config = WorkerConfig(model=Path("m"), nats_url=nats_url)
        await asyncio.to_thread(check_nats, config, Identity("other", "check-d", "rev1"))

    async with beating(nats_url, "check-d", "rev1"):
        with pytest.raises(ConfigError, match=r"HEADRACE_WORKER_ID.*a worker named 'other' serves 'check-d' already"):
            await join_as_other()
    # As after a SIGKILL: nothing is heard of it any more.
    await join_as_other()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    return tmp_path


def test_revision_is_the_same_in_every_version_and_process(model: Path) -> None:
    """Workers of an earlier version serve beside this one, so that the digest must not change."""
    assert served_revision(WorkerConfig(model=model)) == "e68748dafdb6bef8"
    assert served_revision(WorkerConfig(model=model, simulate=1.0)) == "901c9b6c7ecd0511"


def test_name_and_size_of_a_file_count(model: Path) -> None:
    before = model_revision(model)
    (model / "model.safetensors").rename(model / "other.safetensors")
    renamed = model_revision(model)
    (model / "other.safetensors").write_bytes(bytes((1 << 20) + 4096))
    assert len({before, renamed, model_revision(model)}) == 3


@pytest.mark.parametrize(
    ("own", "other", "difference"),
    [
        ("a", "a", None),
        ("a@1", "a@1", None),
        ("a@1", "b@2", "other weights or another number format"),
        ("a", "b@2", "other weights or another number format"),
        ("a@1", "a@2", "another commit at the hub"),
        *((one, two, "the same files as far as samples tell") for one, two in (("a@1", "a"), ("a", "a@1"))),
    ],
)
def test_difference_of_content_is_told_before_that_of_the_commit(own: str, other: str, difference: str | None) -> None:
    told = revision_difference(own, other)
    assert told == difference or (told and difference and told.startswith(difference))


def test_other_weights_of_the_same_size_have_another_revision(model: Path) -> None:
    before = model_revision(model)
    (model / "model.safetensors").write_bytes(bytes([1]) * (1 << 20))
    assert model_revision(model) != before


def test_last_byte_and_small_files_count(model: Path) -> None:
    before = model_revision(model)
    (model / "model.safetensors").write_bytes(bytes((1 << 20) - 1) + b"x")
    changed_weights = model_revision(model)
    (model / "config.json").write_text("[]")
    assert len({before, changed_weights, model_revision(model)}) == 3


def test_each_setting_that_decides_answers_counts(model: Path) -> None:
    settings = ({}, {"dtype": "float32"}, {"kv_cache_dtype": "int8"}, {"simulate": 1.0})
    assert len({served_revision(WorkerConfig(model=model, **changed)) for changed in settings}) == len(settings)


def test_settings_that_change_no_answer_do_not_count(model: Path) -> None:
    settings = ({}, {"max_num_seqs": 3}, {"num_blocks": 9})
    assert len({served_revision(WorkerConfig(model=model, **changed)) for changed in settings}) == 1


def test_commit_of_a_model_from_the_hub_is_told(model: Path, tmp_path: Path) -> None:
    plain = served_revision(WorkerConfig(model=model))
    told = []
    for commit in ("a" * 40, "b" * 40):
        snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for file in ("config.json", "model.safetensors"):
            (snapshot / file).symlink_to(model / file)
        told.append(served_revision(WorkerConfig(model=snapshot)))
    assert told == [f"{plain}@{'a' * 12}", f"{plain}@{'b' * 12}"]
    assert revision_difference(*told) == "another commit at the hub"
    # A copy of the same files, whose commit is unknown.
    assert "only one of the folders says which commit" in (revision_difference(told[0], plain) or "")
    other_type = served_revision(WorkerConfig(model=model, dtype="float32"))
    assert revision_difference(told[0], other_type) == "other weights or another number format"


def test_commit_of_a_download_into_another_folder_is_told(model: Path) -> None:
    plain = served_revision(WorkerConfig(model=model))
    note = model / ".cache" / "huggingface" / "download" / "config.json.metadata"
    note.parent.mkdir(parents=True)
    note.write_text(f"{'c' * 40}\n0123\n1763830000.5\n")
    assert served_revision(WorkerConfig(model=model)) == f"{plain}@{'c' * 12}"
    note.write_text("no commit\n")
    assert served_revision(WorkerConfig(model=model)) == plain


REVISIONS = st.builds(
    lambda content, commit: f"{content}@{commit}" if commit else content,
    st.sampled_from(["aaaa", "bbbb", ""]),
    st.sampled_from(["", "1" * 12, "2" * 12]),
)


@given(REVISIONS, REVISIONS, REVISIONS)
def test_being_the_same_revision_is_an_equivalence(a: str, b: str, c: str) -> None:
    def same(one: str, other: str) -> bool:
        return revision_difference(one, other) is None

    assert same(a, a)
    assert same(a, b) == same(b, a)
    assert not (same(a, b) and same(b, c)) or same(a, c)


@given(st.lists(REVISIONS, max_size=6), st.randoms(use_true_random=False))
def test_who_may_join_does_not_depend_on_who_has_joined_before(workers: list[str], order: Random) -> None:
    """The first worker decides the revision; no worker that joins or leaves later changes it."""
    fleet: list[str] = []
    for worker in workers:
        if all(revision_difference(worker, other) is None for other in fleet):
            fleet.append(worker)
    if fleet:
        # Any part of the fleet lets in the same workers.
        part = order.sample(fleet, order.randint(1, len(fleet)))
        for worker in workers:
            joins = {all(revision_difference(worker, other) is None for other in some) for some in (fleet, part)}
            assert len(joins) == 1
