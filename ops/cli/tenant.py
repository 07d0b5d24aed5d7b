"""`headrace tenant`: print the NATS account of one more tenant who publishes batch jobs."""

from __future__ import annotations

import sys
from string import Template

import click

from ops.cli.nats_user import NatsUserConfig, login
from ops.cli.options import settings_command
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
