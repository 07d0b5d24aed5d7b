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
_NKEY_LENGTH = 56


@dataclass(frozen=True, slots=True)
class TenantConfig:
    """How the tenant's user logs in."""

    nkey: str | None = setting(None, "Public NKey of the user, `U...`; a user with a new password if not given.")


def run(config: TenantConfig, name: str) -> None:
    """Print a NATS account for a tenant who publishes batch jobs.

    Append it to ops/nats/tenants.conf and reload NATS twice (`nats-server --signal reload`, or SIGHUP): NATS connects
    what a new account imports only at the next reload. Then make the tenant's queue with `headrace setup --tenants
    NAME`. Its user may publish jobs of this tenant and read their results, and can reach nothing else.
    """
    token = encode_name(name)
    print(account_block(name, _login(config, token)), end="")
    if sys.stdout.isatty():
        print(
            "append this to ops/nats/tenants.conf, reload NATS twice (SIGHUP), run `headrace setup --tenants`",
            file=sys.stderr,
        )


def account_block(name: str, login: str) -> str:
    """Return the account of a tenant in NATS's configuration language; `login` identifies its user."""
    return _ACCOUNT.substitute(token=encode_name(name), login=login)


def _login(config: TenantConfig, token: str) -> str:
    if config.nkey is None:
        # NATS would take a value of digits only for a number, hence the letter.
        return f'user: "batch-{token}", password: "p{secrets.token_hex(16)}"'
    check_nkey(config.nkey)
    return f'nkey: "{config.nkey}"'


def check_nkey(nkey: str) -> None:
    """Refuse what is no user's public NKey.

    Raises:
        ConfigError: It is none.
    """
    if not (len(nkey) == _NKEY_LENGTH and nkey.isalnum() and nkey.startswith("U")):
        raise ConfigError("HEADRACE_NKEY", f"a user's public NKey is U and {_NKEY_LENGTH - 1} more letters and digits")


command = settings_command(TenantConfig, "tenant", run, [click.Argument(["name"])])
