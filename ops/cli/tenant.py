"""`headrace tenant` and `worker-login`: print NATS configuration for one more tenant, or for workers of a model."""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass
from string import Template

import click

from ops.cli.options import settings_command
from shared.config import setting
from shared.errors import ConfigError
from shared.subjects import encode_name, worker_user

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

    nkey: str | None = setting(
        None, "Public NKey of the user, `U...`; a user with a new password if not given.", is_never_empty=True
    )


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


# What WORKER_ROLE of ops/nats/headrace.conf allows, for one model. Left out is what NATS cannot bind to a model:
# reading and deleting waiting jobs, reading records of progress, making the interactive stream.
_USER = Template("""\
{
  $login
  permissions: {
    publish: {
      allow: [
        "hr.tok.*"
        "hr.worker.$model.$worker", "hr.peer.$model.*"
        "hr.result.*.*"
        "hr.end.*.*", "hr.kept.*", "_R_.API.MSG.GET.HR_ENDS"
        "_R_.API.MSG.GET.HR_MEDIA"
        "_R_.API.PURGE.HR_RESULTS", "_R_.API.PURGE.HR_ENDS"
        "hr.dead.$model.*.*"
        "hr.usage.*.$model.batch.*", "hr.hours.*.$model.batch.*"
        "hr.progress.*.*"
        "_R_.API.MSG.GET.HR_ADAPTERS"
        "hr.reply.>"
        "$$JS.API.INFO"
        "_R_.API.INFO.*"
        "_R_.API.NAMES"
        "_R_.API.*.$model-interactive.hr.req.$model.interactive"
        "_R_.API.*.$model-resumed.hr.req.$model.resumed"
        "_R_.API.*.$model-ready.hr.req.${model}_ready.resumed"
        "_R_.API.*.$model-batch.hr.req.$model.batch.*"
        "_R_.API.*.$model-background.hr.req.$model.background.*"
        "$$JS.API.CONSUMER.INFO.*.$model-interactive", "$$JS.API.CONSUMER.INFO.*.$model-batch"
        "$$JS.API.CONSUMER.INFO.*.$model-resumed", "$$JS.API.CONSUMER.INFO.*.$model-background"
        "$$JS.API.CONSUMER.INFO.*.$model-ready", "$$JS.API.CONSUMER.MSG.NEXT.*.$model-ready"
        "$$JS.ACK.*.$model-ready.>"
        "$$JS.API.CONSUMER.MSG.NEXT.*.$model-interactive", "$$JS.API.CONSUMER.MSG.NEXT.*.$model-batch"
        "$$JS.API.CONSUMER.MSG.NEXT.*.$model-resumed", "$$JS.API.CONSUMER.MSG.NEXT.*.$model-background"
        "$$JS.ACK.*.$model-interactive.>", "$$JS.ACK.*.$model-resumed.>", "$$JS.ACK.*.$model-batch.>"
        "$$JS.ACK.*.$model-background.>"
        "_INBOX_gateway.answers.>", "_INBOX_admin.answers.>"
      ]
    }
    subscribe: {
      allow: [
        "hr.worker.$model.*", "hr.peer.$model.$worker"
        "hr.cancel.$model"
        "hr.tokenizer.$model"
        "hr.probe.*", "hr.drain.*", "hr.adapter.*"
        "hr.gateway.*"
        "_INBOX_worker.$model.>"
      ]
    }
  }
}
""")


@dataclass(frozen=True, slots=True)
class WorkerLoginConfig(NatsUserConfig):
    """A user for all workers of a model, or for one."""

    worker_id: str | None = setting(None, "The one worker that the login may speak for.", is_never_empty=True)


def run_worker_login(config: WorkerLoginConfig, model: str) -> None:
    """Print a NATS user for the workers of one model.

    Put it into the users of the account HEADRACE in ops/nats/headrace.conf, beside `worker`, and reload NATS. MODEL is
    the name that is served. Workers with this login pull requests of this model alone, and hear no prompts of others.
    Four things remain: it writes results, replies and progress of any job whose tenant and id it knows, and can purge
    results; it sends frames of any request whose gateway and id it knows; it can read the images of all requests while
    they are stored; and it can have NATS's empty answers, and requests that wait, sent to subjects of this account, but
    not to JetStream's API.
    With --worker-id, which the worker needs too, it sends heartbeats under one name; without, under the name of any
    worker of the model, whose handovers of KV it can divert. Jobs that no worker takes in time are expired by workers
    with the login `worker` alone.
    """
    print(user_block(model, login(config, worker_user(model, config.worker_id)), config.worker_id), end="")
    if sys.stdout.isatty():
        place = "the users of the account HEADRACE in ops/nats/headrace.conf"
        print(f"put this into {place}, and reload NATS (SIGHUP)", file=sys.stderr)


def user_block(model: str, user: str, worker: str | None = None) -> str:
    """Return the user in NATS's configuration language, for one worker or all; `user` is how it logs in."""
    token = "*" if worker is None else encode_name(worker)
    return _USER.substitute(model=encode_name(model), login=user, worker=token)


worker_login = settings_command(WorkerLoginConfig, "worker-login", run_worker_login, [click.Argument(["model"])])
