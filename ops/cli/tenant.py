"""`headrace tenant`: print the NATS account of one more tenant who publishes batch jobs."""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass
from string import Template

import click

from ops.cli.options import settings_command
from shared.config import setting
from shared.errors import ConfigError
from shared.subjects import encode_name

_NKEY_LENGTH = 56
_ACCOUNT = Template("""\
TENANT_$token {
  limits: { max_connections: 256, max_subscriptions: 1024, max_payload: 4MB }
  imports: [
    { service: { account: HEADRACE, subject: "hr.req.*.batch.$token" } }
    { service: { account: HEADRACE, subject: "$$JS.API.DIRECT.GET.HR_RESULTS.hr.result.$token.*" } }
    { stream: { account: HEADRACE, subject: "hr.stored.$token.*" }, to: "hr.result.$token.*" }
    { stream: { account: HEADRACE, subject: "hr.reply.$token.>" } }
  ]
  users: [
    {
      $login
      permissions: {
        publish: { allow: ["hr.req.*.batch.$token", "$$JS.API.DIRECT.GET.HR_RESULTS.hr.result.$token.*"] }
        subscribe: { allow: ["hr.result.$token.*", "hr.reply.$token.>", "_INBOX.>", "_INBOX_batch.>"] }
      }
    }
  ]
}
""")


@dataclass(frozen=True, slots=True)
class NatsUserConfig:
    """How a NATS user logs in whose configuration is printed: with an NKey, or with a new password."""

    nkey: str | None = setting(None, "Public NKey of the user, `U...`; a user with a new password if not given.")


def login(config: NatsUserConfig, user: str) -> str:
    """Return the fields of NATS's configuration that identify a user.

    Raises:
        ConfigError: The NKey is not a user's public one.
    """
    if config.nkey is None:
        # NATS would take a password of digits only for a number, hence the letter.
        return f'user: "{user}", password: "p{secrets.token_hex(16)}"'
    if not (len(config.nkey) == _NKEY_LENGTH and config.nkey.isalnum() and config.nkey.startswith("U")):
        raise ConfigError("HEADRACE_NKEY", f"a user's public NKey is U and {_NKEY_LENGTH - 1} more letters and digits")
    return f'nkey: "{config.nkey}"'


def run(config: NatsUserConfig, name: str) -> None:
    """Print a NATS account for a tenant who publishes batch jobs.

    Append it to ops/nats/tenants.conf and reload NATS twice (`nats-server --signal reload`, or SIGHUP): NATS connects
    what a new account imports only at the next reload. Then make the tenant's queue with `headrace setup --tenants
    NAME`. Its user may publish jobs of this tenant and read their results, and can reach nothing else.
    """
    print(account_block(name, login(config, f"batch-{encode_name(name)}")), end="")
    if sys.stdout.isatty():
        print(
            "append this to ops/nats/tenants.conf, reload NATS twice (SIGHUP), run `headrace setup --tenants`",
            file=sys.stderr,
        )


def account_block(name: str, user: str) -> str:
    """Return the account of a tenant in NATS's configuration language; `user` is how its user logs in."""
    return _ACCOUNT.substitute(token=encode_name(name), login=user)


command = settings_command(NatsUserConfig, "tenant", run, [click.Argument(["name"])])
