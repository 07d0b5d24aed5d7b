"""What the units of systemd say, as far as no machine is needed to see it."""

from __future__ import annotations

from tests.ops.deploy.unit_file import read_unit


def test_check_before_a_worker_starts_has_the_time_that_a_download_takes() -> None:
    unit = read_unit("headrace-worker@.service")
    assert [command.split()[-1] for command in unit.all("ExecStartPre")] == ["--check"]
    # systemd would end it after 90 s.
    assert unit.all("TimeoutStartSec") == ["infinity"]


def test_log_of_nats_is_bounded() -> None:
    unit = read_unit("headrace-nats.service")
    # It prints a line for each call that a login may not make.
    assert (unit.all("LogRateLimitIntervalSec"), unit.all("LogRateLimitBurst")) == (["10s"], ["200"])
