"""The page of findings, and its verdict."""

from __future__ import annotations

from ops.doctor.finding import Finding, exit_code, page, problem, unseen, verdict, warning


def test_text_of_others_forges_no_line_of_the_page() -> None:
    shown = page([problem("workers", "w\nok    nats    all is well\x1b[2J serves m")], str)
    assert len(shown.splitlines()) == 3
    assert "\x1b" not in shown


def test_verdict_says_what_it_does_not_cover() -> None:
    none = unseen("nats", "none is named")
    assert verdict([none]) == "Nothing is wrong in the parts checked. Not found, so not checked: nats."
    assert verdict([none, problem("a", "is bad")]) == "1 problem. Not found, so not checked: nats."
    assert verdict([Finding("a", "is good")]) == "Nothing is wrong."


def test_verdict_counts() -> None:
    findings = [problem("a", "is bad", "mend it"), warning("bb", "is so-so"), unseen("c", "is not named", "name it")]
    text = page([*findings, Finding("d", "is good")], str)
    assert text.splitlines() == [
        "FAIL  a   is bad",
        "          -> mend it",
        "warn  bb  is so-so",
        "--    c   is not named",
        "          -> name it",
        "ok    d   is good",
        "",
        "1 problem, 1 warning. Not found, so not checked: c.",
    ]


def test_settings_are_named_as_the_reader_gave_them_but_not_in_what_is_fine() -> None:
    findings = [Finding("a", "HEADRACE_X is 1"), problem("b", "HEADRACE_X is 2", "set HEADRACE_X")]
    assert page(findings, lambda text: text.replace("HEADRACE_X", "--x")).splitlines()[:3] == [
        "ok    a  HEADRACE_X is 1",
        "FAIL  b  --x is 2",
        "         -> set --x",
    ]


def test_only_a_problem_is_an_exit_code() -> None:
    assert exit_code([problem("a", "is bad"), Finding("b", "is good")]) == 1
    assert exit_code([warning("a", "is so-so"), unseen("b", "is not named"), Finding("c", "is good")]) == 0
