"""The secrets that reasoning is encrypted with, as an operator sets them.

Apart from the encryption, so that who checks settings before a start imports nothing else.
"""

from __future__ import annotations

from shared.errors import ConfigError

SECRET_VARIABLE = "HEADRACE_RESPONSES_SECRET"
MIN_SECRET_CHARACTERS = 32


def read_secrets(setting: str | None) -> list[str]:
    """Return the secrets of a setting, which commas separate; none where it is empty.

    Raises:
        ConfigError: A secret is too short.
    """
    if not setting:
        return []
    secrets = [secret.strip() for secret in setting.split(",")]
    if any(len(secret) < MIN_SECRET_CHARACTERS for secret in secrets):
        raise ConfigError(SECRET_VARIABLE, f"has a secret of fewer than {MIN_SECRET_CHARACTERS} characters")
    return secrets
