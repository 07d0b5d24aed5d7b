from __future__ import annotations

from pathlib import Path

import transformers

from gpu_worker.models.families import families
from gpu_worker.models.support_page import sample_config, support_page

PAGE = Path(__file__).parents[3] / "ops/docs/models.md"


def test_the_page_is_what_the_families_say() -> None:
    problem = "run: python -m gpu_worker.models.support_page > ops/docs/models.md"
    assert PAGE.read_text() == support_page(), problem


def test_absent_base_of_the_rotation_means_what_it_means_to_transformers() -> None:
    compared = 0
    for family in families():
        stem = family.architecture.removesuffix("ForCausalLM")
        default = getattr(getattr(transformers, f"{stem}Config", None), "default_theta", None)
        ropes = sample_config(family.architecture).ropes
        # Where layers differ in it, tests of the families have both.
        if isinstance(default, float | int) and len(ropes) == 1:
            compared += 1
            assert ropes[0].theta == default, family.architecture
    assert compared > 40
