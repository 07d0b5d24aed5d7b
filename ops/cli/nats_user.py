"""How a NATS user logs in for whom a command prints the configuration: with an NKey, or with a new password."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from shared.config import setting
from shared.errors import ConfigError

_NKEY_LENGTH = 56


@dataclass(frozen=True, slots=True)
class NatsUserConfig:
    """How the user logs in."""

    nkey: str | None = setting(None, "Public NKey of the user, `U...`; a user with a new password if not given.")


def login(config: NatsUserConfig, user: str) -> str:
    """Return the fields of NATS's configuration that identify a user.

    Raises:
        ConfigError: The NKey is not a user's public one.
    """
    if config.nkey is None:
        return f'user: "{user}", password: "{_password()}"'
    if not (len(config.nkey) == _NKEY_LENGTH and config.nkey.isalnum() and config.nkey.startswith("U")):
        raise ConfigError("HEADRACE_NKEY", f"a user's public NKey is U and {_NKEY_LENGTH - 1} more letters and digits")
    return f'nkey: "{config.nkey}"'


def _password() -> str:
    # NATS would take a value of digits only for a number, hence the letter.
    return f"p{secrets.token_hex(16)}"
