"""`headrace worker-login`: print a NATS user for workers that pull the requests of one model alone."""

from __future__ import annotations

import sys
from string import Template

import click

from ops.cli.options import settings_command
from ops.cli.tenant import NatsUserConfig, login
from shared.subjects import encode_name

# What WORKER_ROLE of ops/nats/headrace.conf allows, for one model. Left out is what NATS cannot bind to a model:
# reading and deleting waiting jobs, reading records of progress, making the interactive stream.
_USER = Template("""\
{
  $login
  permissions: {
    publish: {
      allow: [
        "hr.tok.*"
        "hr.worker.$model.*", "hr.peer.$model.*"
        "hr.result.*.*"
        "hr.end.*.*", "hr.kept.*", "$$JS.API.STREAM.MSG.GET.HR_ENDS"
        "$$JS.API.STREAM.MSG.GET.HR_MEDIA"
        "$$JS.API.STREAM.PURGE.HR_RESULTS", "$$JS.API.STREAM.PURGE.HR_ENDS"
        "hr.dead.$model.*.*"
        "hr.usage.*.$model.batch.*"
        "hr.progress.*.*"
        "$$JS.API.STREAM.MSG.GET.HR_ADAPTERS"
        "hr.reply.>"
        "$$JS.API.INFO"
        "$$JS.API.STREAM.INFO.*"
        "$$JS.API.STREAM.NAMES"
        "$$JS.API.CONSUMER.CREATE.*.$model-interactive.hr.req.$model.interactive"
        "$$JS.API.CONSUMER.CREATE.*.$model-resumed.hr.req.$model.resumed"
        "$$JS.API.CONSUMER.CREATE.*.$model-ready.hr.req.${model}_ready.resumed"
        "$$JS.API.CONSUMER.CREATE.*.$model-batch.hr.req.$model.batch.*"
        "$$JS.API.CONSUMER.CREATE.*.$model-background.hr.req.$model.background.*"
        "$$JS.API.CONSUMER.INFO.*.$model-interactive", "$$JS.API.CONSUMER.INFO.*.$model-batch"
        "$$JS.API.CONSUMER.INFO.*.$model-resumed", "$$JS.API.CONSUMER.INFO.*.$model-background"
        "$$JS.API.CONSUMER.INFO.*.$model-ready", "$$JS.API.CONSUMER.MSG.NEXT.*.$model-ready"
        "$$JS.ACK.*.$model-ready.>"
        "$$JS.API.CONSUMER.MSG.NEXT.*.$model-interactive", "$$JS.API.CONSUMER.MSG.NEXT.*.$model-batch"
        "$$JS.API.CONSUMER.MSG.NEXT.*.$model-resumed", "$$JS.API.CONSUMER.MSG.NEXT.*.$model-background"
        "$$JS.ACK.*.$model-interactive.>", "$$JS.ACK.*.$model-resumed.>", "$$JS.ACK.*.$model-batch.>"
        "$$JS.ACK.*.$model-background.>"
      ]
    }
    subscribe: {
      allow: [
        "hr.worker.$model.*", "hr.peer.$model.*"
        "hr.cancel.$model"
        "hr.tokenizer.$model"
        "hr.probe.*", "hr.drain.*", "hr.adapter.*"
        "hr.gateway.*"
        "_INBOX_worker.$model.>"
      ]
    }
    allow_responses: { max: 1, expires: "60s" }
  }
}
""")


def run(config: NatsUserConfig, model: str) -> None:
    """Print a NATS user for the workers of one model.

    Put it into the users of the account HEADRACE in ops/nats/headrace.conf, beside `worker`, and reload NATS. MODEL is
    the name that is served. Workers with this login pull requests of this model alone, and hear no prompts of others.
    Four things remain: it writes results, replies and progress of any job whose tenant and id it knows, and can purge
    results; it sends frames of any request whose gateway and id it knows; it can read the images of all requests while
    they are stored; and it can have NATS's empty answers, and requests that wait, sent to any subject. Calls of
    JetStream's API that this could misuse are closed in the account SYS, but for purges of four streams.
    Jobs that no worker takes in time are expired by workers with the login `worker` alone.
    """
    print(user_block(model, login(config, f"worker-{encode_name(model)}")), end="")
    if sys.stdout.isatty():
        place = "the users of the account HEADRACE in ops/nats/headrace.conf"
        print(f"put this into {place}, and reload NATS (SIGHUP)", file=sys.stderr)


def user_block(model: str, user: str) -> str:
    """Return the user in NATS's configuration language; `user` is how it logs in."""
    return _USER.substitute(model=encode_name(model), login=user)


command = settings_command(NatsUserConfig, "worker-login", run, [click.Argument(["model"])])
