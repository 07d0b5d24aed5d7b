"""Whether a worker with these settings could start, as far as that is known without NATS and before a model is loaded.

`headrace up` asks before it starts anything, in a process of its own: `python -m gpu_worker.start.settings_check` reads
the settings from its environment. It exits with 0, or with 2 and the problem on its standard output.
"""

from __future__ import annotations

import dataclasses
import os
import sys

import msgspec

from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.engine_setup import check_engine, lora_modules
from gpu_worker.start.settings_problem import EXIT_BAD_SETTINGS, SettingsProblem
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ChatSettings, ModelTokenizer
from gpu_worker.text.vocabulary_check import check_vocabulary
from shared.adapter_files import CONFIG_NAME
from shared.config import resolve
from shared.errors import ConfigError, HeadraceError
from shared.model_hub import local_model
from shared.subjects import check_model_name, check_setting


def check_settings(config: WorkerConfig) -> None:
    """Refuse with `HeadraceError` settings that do not fit the model, the machine or each other."""
    if (model := config.model) is None:
        raise ConfigError("HEADRACE_MODEL", "is required")
    if config.served_model_name is not None:
        check_setting("HEADRACE_SERVED_MODEL_NAME", config.served_model_name, check_model_name)
    if config.worker_id is not None:
        check_setting("HEADRACE_WORKER_ID", config.worker_id)
    if config.draft_model is not None:
        config = dataclasses.replace(config, draft_model=local_model(config.draft_model, "HEADRACE_DRAFT_MODEL"))
    for adapter in lora_modules(config).values():
        if not (adapter / CONFIG_NAME).is_file():
            raise ConfigError("HEADRACE_LORA_MODULES", f"{adapter} is no adapter: it has no {CONFIG_NAME}")
    directory = read_model_directory(model)
    tokenizer = ModelTokenizer(directory, ChatSettings(config.chat_format, config.allow_chat_template))
    check_vocabulary(tokenizer, directory)
    check_engine(config, directory, tokenizer)


def main() -> int:
    """Check the settings of the environment, and return the exit status."""
    try:
        check_settings(resolve(WorkerConfig, {}, os.environ))
    except ConfigError as error:
        problem = SettingsProblem(error.problem, error.variable)
    except HeadraceError as error:
        problem = SettingsProblem(str(error))
    else:
        return 0
    sys.stdout.buffer.write(msgspec.json.encode(problem))
    return EXIT_BAD_SETTINGS


if __name__ == "__main__":
    sys.exit(main())
