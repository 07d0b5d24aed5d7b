"""`headrace up`: plan, start, say how to use it, wait, stop."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import Mapping

from ops.stack.banner import banner
from ops.stack.config import DEMO_MODEL, UpConfig
from ops.stack.console import Console
from ops.stack.plan import make_plan
from ops.stack.preconditions import check_parts
from ops.stack.state import StateDirectory
from ops.stack.supervisor import Supervisor
from shared.errors import ConfigError
from shared.model_hub import existing_model, hub_id, local_model


def run(config: UpConfig, environ: Mapping[str, str]) -> int:
    """Run the whole system until a signal stops it, and return the exit code.

    Raises:
        ConfigError: A setting cannot be used.
        DependencyError: A server or another child cannot run.
    """
    if config.model is not None and (name := hub_id(config.model)) is not None:
        # Once for all workers, which are told the folder.
        config = dataclasses.replace(config, model=local_model(config.model, "HEADRACE_MODEL"))
        environ = {**environ, "HEADRACE_SERVED_MODEL_NAME": environ.get("HEADRACE_SERVED_MODEL_NAME") or name}
    existing_model(config.model or DEMO_MODEL, "HEADRACE_MODEL")
    if config.ready_file is not None and not config.ready_file.absolute().parent.is_dir():
        raise ConfigError("HEADRACE_READY_FILE", f"{config.ready_file.absolute().parent} is not a directory")
    if config.ready_file is not None and config.ready_file.is_dir():
        raise ConfigError("HEADRACE_READY_FILE", f"{config.ready_file} is a directory; name a file")
    state = StateDirectory(config.state_dir)
    try:
        return asyncio.run(_run(config, state, environ, Console()))
    finally:
        state.close()


async def _run(config: UpConfig, state: StateDirectory, environ: Mapping[str, str], console: Console) -> int:
    began = time.monotonic()
    plan = make_plan(config, state, environ)
    check_parts(plan, console, is_demo=config.model is None)
    simulated = f"a simulated engine, {config.simulate:g} ms a step" if config.simulate is not None else None
    served = simulated or (str(config.model) if config.model is not None else "the demo model")
    console.say("headrace", f"starting with {served}; logs in {state.logs}")
    supervisor = Supervisor(plan, state, config.ready_file, console, config.hang_timeout_s)
    try:
        if await supervisor.start():
            assert supervisor.model is not None
            console.say("headrace", f"ready in {time.monotonic() - began:.1f} s; Ctrl-C stops it")
            sys.stdout.write(banner(plan, supervisor.model, is_demo=config.model is None))
            sys.stdout.flush()
            await supervisor.wait()
    finally:
        await supervisor.stop()
    console.say("headrace", "stopped")
    return 0
