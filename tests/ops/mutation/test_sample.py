"""The operators make the mistakes they are named for, and a seed draws the same ones."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ops.mutation import sample
from ops.mutation.sample import PACKAGES, ROOT, draw, rooms
from ops.mutation.semantic import is_crash, is_order_visible

SOURCE = '''
class Account:
    limit: int
    used: int
    name: str

    def __init__(self, log: list[str]) -> None:
        self._log = log

    async def take(self, amount: int, wanted: int, by: str) -> tuple[int, str]:
        """Take "what is there" of it."""
        if amount < 0:
            raise ValueError("a message")
        async with self.lock:
            self.used += amount
            await self.save(self.used, key=by)
        _log.info("took %s", amount)
        self.on_taken(by)
        first = await self.first()
        second = await max(self.second(), first, wanted)
        return amount, self.name if wanted else f"{amount + 1}"
'''


def _changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str, str]]:
    (tmp_path / "account.py").write_text(SOURCE)
    monkeypatch.setattr(sample, "ROOT", tmp_path)
    mutants = draw(["account.py"], 1000, 0)
    for mutant in mutants:
        compile(mutant.source, mutant.path, "exec")
    return {(mutant.operator, mutant.before, mutant.after) for mutant in mutants}


def test_semantic_operators_make_plausible_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = _changes(tmp_path, monkeypatch)
    last = 'return amount, self.name if wanted else f"{amount + 1}"'
    assert changes >= {
        ("branch", "if amount < 0:", "if not (amount < 0):"),
        ("branch", last, 'return amount, self.name if not (wanted) else f"{amount + 1}"'),
        ("return", 'if amount < 0: raise ValueError("a message")', "pass"),
        ("return", 'raise ValueError("a message")', "pass"),
        ("guard", "async with self.lock:", 'async with __import__("contextlib").nullcontext():'),
        ("call", "self.used += amount", "pass"),
        ("call", "await self.save(self.used, key=by)", "pass"),
        ("argument", "await self.save(self.used, key=by)", "await self.save(self.used)"),
        ("argument", "await self.save(self.used, key=by)", "await self.save(key=by)"),
        ("variable", "await self.save(self.used, key=by)", "await self.save(self.limit, key=by)"),
        ("variable", "self.used += amount", "self.used += wanted"),
        ("element", last, "return (amount,)"),
        (
            "exchange",
            "self.used += amount await self.save(self.used, key=by)",
            "await self.save(self.used, key=by) self.used += amount",
        ),
        # Whoever waits may be overtaken meanwhile.
        ("exchange", "self.on_taken(by) first = await self.first()", "first = await self.first() self.on_taken(by)"),
    }
    # Of three values none is the bound.
    assert not [after for operator, before, after in changes if operator == "guard" and "max(" in before]
    of_prose = {name for name, before, _ in changes if before.startswith(("_log.info", "limit"))}
    assert of_prose <= {"exchange"}


@pytest.mark.parametrize(
    ("operator", "error", "is_counted"),
    [
        ("argument", 'Missing positional argument "one"  [call-arg]', False),
        ("argument", 'All overload variants of "pow" require at least two arguments  [call-overload]', False),
        ("element", 'Incompatible return value type (got "tuple[int]")  [return-value]', False),
        # A default of another type is a mistake that could pass.
        ("argument", 'Incompatible return value type (got "None")  [return-value]', True),
        ("return", "Missing return statement  [return]", True),
    ],
)
def test_mutant_that_mypy_refuses_for_its_arguments_or_length_is_not_counted(
    operator: str, error: str, is_counted: bool
) -> None:
    assert is_crash(operator, f"sample.py:1: error: {error}") != is_counted


def test_seed_draws_the_same_sample_and_skip_goes_on_behind_it() -> None:
    files = rooms()["gateway.fleet"][:1]
    first = draw(files, 12, seed=1)
    assert len({(each.path, each.before, each.after) for each in first}) == 12
    # The operators take turns.
    assert len({each.operator for each in first}) >= 6
    assert draw(files, 5, seed=1, skip=7) == first[7:]
    assert draw(files, 12, seed=2) != first


def test_every_file_is_in_one_room() -> None:
    files = [path for paths in rooms().values() for path in paths]
    assert len(set(files)) == len(files)
    assert set(files) == {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    }


def test_bodies_of_triton_kernels_are_left_out() -> None:
    path = "kernels/rms_norm/triton_kernel.py"
    assert "tl.load" in (ROOT / path).read_text()
    assert not [mutant for mutant in draw([path], 1000, 0) if "tl." in mutant.before]


@pytest.mark.parametrize(
    ("code", "is_visible"),
    [
        ("x = self.y\nself.y = x + 1", False),  # `x` would not be bound.
        ("self.y = 1\nself.y = 2", True),
        ("x = self.y\nself.y = 2", True),
        ("x = self.y\nself.z = 2", False),
        ("a()\nb()", True),
        ("a()\nreturn", False),
    ],
)
def test_order_of_two_statements_is_visible_where_one_changes_what_the_other_reads(code: str, is_visible: bool) -> None:
    first, second = ast.parse(code).body
    assert is_order_visible(first, second) is is_visible


def test_bound_is_left_out_of_calls_of_one_value_and_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = ("await shield(a)", "await wait_for(b, 1)", "return min(a, b), max(*c), max(a, b, 3)")
    code = "async def f(a, b, *c):" + "".join(f"\n    {line}" for line in body)
    (tmp_path / "bounds.py").write_text(code)
    monkeypatch.setattr(sample, "ROOT", tmp_path)
    guards = {mutant.after for mutant in draw(["bounds.py"], 100, 0) if mutant.operator == "guard"}
    returned = {f"return ({kept}), max(*c), max(a, b, 3)" for kept in "ab"}
    assert guards == {"await (a)", "await (b)", *returned}


def test_last_element_leaves_an_empty_list_and_no_dictionary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elements.py").write_text("def f(a, b):\n    return a in {b} or a in [b] or a in {a, b}\n")
    monkeypatch.setattr(sample, "ROOT", tmp_path)
    changed = {mutant.after for mutant in draw(["elements.py"], 100, 0) if mutant.operator == "element"}
    assert changed == {
        "return a in [] or a in [b] or a in {a, b}",
        "return a in {b} or a in [] or a in {a, b}",
        "return a in {b} or a in [b] or a in {a}",
        "return a in {b} or a in [b] or a in {b}",
    }
