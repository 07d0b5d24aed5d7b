"""What became of mutants is kept between pieces of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation.mutant import Mutant
from tests.mutation.verdicts import Count, KeptVerdicts, Verdict, claim


def test_verdict_is_known_to_the_next_piece_and_only_of_its_room_and_change(tmp_path: Path) -> None:
    mutant, other = Mutant("a.py", "", "x", "y", range(3, 4)), Mutant("a.py", "", "x", "z", range(3, 4))
    kept = KeptVerdicts(tmp_path)
    kept.keep("gateway", mutant, Verdict.SURVIVED, None)
    kept.keep("gateway", mutant, Verdict.TESTS, "test_a.py::test_x")
    again = KeptVerdicts(tmp_path)
    assert again.of("gateway", mutant) is Verdict.TESTS
    assert (again.of("shared", mutant), again.of("gateway", other)) == (None, None)


def test_folder_of_another_state_of_the_code_is_refused(tmp_path: Path) -> None:
    code = tmp_path / "a.py"
    code.write_text("1")
    for _ in range(2):
        claim(tmp_path / "kept", tmp_path, ["a.py"])
    code.write_text("2")
    with pytest.raises(SystemExit, match="another state of the code"):
        claim(tmp_path / "kept", tmp_path, ["a.py"])


def test_share_is_of_what_was_tested() -> None:
    count, whole = Count(), Count()
    for verdict in Verdict:
        count.add(verdict)
    whole.add_all(count)
    whole.add_all(count)
    assert (whole.num_noticed, whole.num_tested, whole.equivalent) == (6, 8, 2)
