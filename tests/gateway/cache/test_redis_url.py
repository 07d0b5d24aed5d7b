"""URLs of Redis that are refused at the start, without a word of what may be a password."""

from __future__ import annotations

import pytest

from gateway.cache.redis_url import check_redis_url
from shared.errors import ConfigError


@pytest.mark.parametrize(
    "url",
    [
        None,
        "",
        "redis://127.0.0.1:6379",
        "redis://:secret@host:6379/2",
        "rediss://host?ssl_cert_reqs=none",
        "unix:///run/redis.sock",
    ],
)
def test_url_that_the_client_can_use_is_accepted(url: str | None) -> None:
    check_redis_url(url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://host", "begins with none of redis://, rediss:// and unix://"),
        ("redis://host:port", "has no host and port that can be told"),
        ("redis://:5#cret@host:6379/0", "has something behind its host and port that is not a number of a database"),
        ("redis://:se/cret@host:6379", "has no host and port that can be told"),
        ("redis://host/secret", "has something behind its host and port that is not a number of a database"),
        ("redis://host?secret=1", "has an option behind its ? that cannot be used: secret"),
    ],
)
def test_url_that_the_client_cannot_use_is_refused_without_its_secrets(url: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_redis_url(url)
    assert "HEADRACE_REDIS_URL" in str(refusal.value)
    assert message in str(refusal.value)
    assert "cret@" not in str(refusal.value)
