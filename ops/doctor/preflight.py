"""`headrace worker --check`: whether a worker with these settings could serve, found out without joining the fleet."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from gpu_worker.quantization.gguf.model_file import SUFFIX
from gpu_worker.start.assembly import Identity
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.model_revision import served_revision
from gpu_worker.start.nats_check import check_nats
from ops.doctor.finding import Finding, Level, exit_code, page, problem
from ops.doctor.machine import machine_findings
from ops.doctor.model import model_findings
from ops.doctor.servers import NatsLogin, nats_findings
from shared.errors import ConfigError, HeadraceError
from shared.model_hub import hub_id, local_model


def preflight(config: WorkerConfig, as_given: Callable[[str], str]) -> int:
    """Print what was found, and return the exit status: 1 where this worker could not serve.

    Args:
        config: The worker's settings.
        as_given: Names the settings in a text by option or by variable, as the user gave them.
    """
    findings = list(_findings(config))
    print(page(findings, as_given))
    return exit_code(findings)


def _findings(config: WorkerConfig) -> Iterator[Finding]:
    yield from machine_findings(Path(), os.environ)
    of_model = list(model_findings(config))
    yield from of_model
    name = None if config.model is None else _served_name(config, config.model)
    login = NatsLogin(config.nats_url, "worker", config.nats_user, config.nats_password, config, name)
    found = asyncio.run(nats_findings(login))
    # A worker that is the first of its fleet hears nobody, and finds no queue that it would not make itself.
    yield from (Finding(one.topic, one.text) if one.level is Level.WARNING else one for one in found)
    # A model that cannot be read has no revision: one cause is told once.
    is_readable = not any(one.topic == "model" and one.level is Level.PROBLEM for one in of_model)
    if is_readable and not any(one.level is Level.PROBLEM for one in found):
        yield _revision(config)


def _served_name(config: WorkerConfig, path: Path) -> str:
    """Return the name under which a model would be served that lies at `path`, which may be an id at the hub."""
    assert config.model is not None
    return config.served_model_name or hub_id(config.model) or path.resolve().name.removesuffix(SUFFIX)


def _revision(config: WorkerConfig) -> Finding:
    assert config.model is not None
    try:
        path = local_model(config.model, "HEADRACE_MODEL")
        name = _served_name(config, path)
        config = dataclasses.replace(config, model=path)
        identity = Identity("headrace-check", name, served_revision(config))
        check_nats(config, identity)
    except ConfigError as error:
        return problem("revision", error.problem)
    except HeadraceError as error:
        return problem("revision", str(error))
    return Finding("revision", f"{identity.revision} of {name!r}; no other worker contradicts it")
