"""`headrace bench serve` and `compare` against our own system, and against servers that are not ours."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ops.cli.status_line import REDRAW_S, TELL_EVERY_S, StatusLine
from tests.clock import Clock
from tests.integration.system import System
from tests.ops.cli.command import headrace_here
from tests.ops.load_generator.foreign_server import foreign_server

FEW = ("--random-input-len", "24", "--random-output-len", "8")


def serve(url: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return headrace_here("bench", "serve", "--url", url, *FEW, *arguments, **environ)


def test_own_system_is_measured_and_compared(cli_system: System, state_dir: Path, tmp_path: Path) -> None:
    reports = [tmp_path / "a.json", tmp_path / "b.json"]
    page = tmp_path / "page.html"
    for seed, report in enumerate(reports):
        where = ("--state-dir", str(state_dir), "--json", str(report), "--html", str(page), "--seed", str(seed))
        load = ("--num-prompts", "30", "--request-rate", "100", "--burstiness", "0.5", "--ignore-eos")
        done = headrace_here("bench", "serve", *where, *load, *FEW, "--goodput", "ttft:60000", "itl:60000")
        assert done.returncode == 0, done.stderr
        assert re.search(r"^completed +30 of 30 ", done.stdout, re.MULTILINE)
        assert "100.0% of requests (ttft:60000 itl:60000 ms)" in done.stdout
        found = json.loads(report.read_text())
        assert found["summary"]["output_tokens"] == 30 * 8
        # Words became tokens as the server counts them.
        assert 20 <= found["summary"]["prompt_tokens"] / 30 <= 28
        assert all(len(request.get("gaps_s", ())) <= 7 and request["ttft_s"] > 0 for request in found["requests"])
        assert cli_system.info["api_key"] not in report.read_text()

    plots = re.findall(r"<svg.*?</svg>", page.read_text(), re.DOTALL)
    assert len(plots) == 4
    assert all(ElementTree.fromstring(plot).tag == "svg" for plot in plots)
    compared = headrace_here("bench", "compare", *map(str, reports))
    assert compared.returncode == 0, compared.stderr
    assert re.search(
        r"^completed, % +100.00 +100.00 +1.000 +1.000 to 1.000 +no difference seen$", compared.stdout, re.M
    )
    assert "different loads: --seed not set and 1." in compared.stdout


def test_one_file_for_both_reports_is_refused(tmp_path: Path) -> None:
    report = tmp_path / "a.json"
    done = serve("http://127.0.0.1:1", "--json", str(report), "--html", str(tmp_path / "." / "a.json"))
    assert done.returncode != 0
    assert f"--html: is {report}, which is the file of --json too" in done.stderr
    assert not report.exists()


def test_agents_keep_their_conversations(state_dir: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    load = ("--dataset-name", "agents", "--turns", "2", "--requests", "2", "--random-prefix-len", "64", "--seed", "9")
    done = headrace_here("bench", "serve", "--state-dir", str(state_dir), *load, *FEW, "--json", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(report.read_text())["requests"]
    later = [request for request in found if request.get("turn", 0) > 0]
    assert len(later) == len(found) - 2 > 0
    # What a turn adds to is in the prefix cache of the one worker.
    assert all(request["cached_tokens"] >= 48 for request in later)


def test_faults_of_a_foreign_server_are_counted_apart(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    faults = ("good", "no usage", "busy", "busy", "cut", "broken", "nonsense", "error", "not a stream", "gone", "good")
    with foreign_server(*faults) as server:
        done = serve(server.url, "--requests", "11", "--max-concurrency", "1", "--json", str(report), "--seed", "2")
        lengths = {len(body["prompt"].split()) for body in server.bodies}
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())["summary"]
    assert (found["completed"], found["refused"], found["failed"]) == (3, 2, 6)
    assert found["problems"] == {
        "status 503": 2,
        "the stream was cut": 1,
        "status 500: no memory": 1,
        "not an event of this API: '<html>'": 1,
        "an error event within the stream": 1,
        'no event stream: \'{"choices": [{"text": "all at once"}]}\'': 1,
        "closed without an answer": 1,
    }
    # By the usage 6 each; without one the pieces of text.
    assert (found["output_tokens"], found["without_usage"]) == (6 + 3 + 6, 1)
    assert "refused (429, 503)  2; Retry-After 7 to 7 s" in done.stdout
    assert "1 answers told no usage: their tokens are counted by pieces of text." in done.stdout
    # It makes two tokens of a word, and ten more.
    assert lengths == {7}


def test_chat_shows_images_and_other_fields(tmp_path: Path) -> None:
    more = ("--backend", "openai-chat", "--images", "2", "--image-size", "8x4", "--extra-body", '{"top_k": 3}')
    with foreign_server("good") as server:
        done = serve(server.url, *more, "--requests", "1")
        (body,) = server.bodies
    assert done.returncode == 0, done.stderr
    assert [part["type"] for part in body["messages"][0]["content"]] == ["image_url", "image_url", "text"]
    assert (body["top_k"], body["max_tokens"], body["stream_options"]) == (3, 8, {"include_usage": True})
    assert "ignore_eos" not in body


def test_trace_is_sent_with_its_times_and_lengths(tmp_path: Path) -> None:
    lines = [{"timestamp": at, "input_length": 30, "output_length": 3 + at // 100} for at in (1000, 1100, 1300)]
    trace, report = tmp_path / "trace.jsonl", tmp_path / "report.json"
    trace.write_text("\n".join(map(json.dumps, lines)))
    with foreign_server("good") as server:
        of_trace = ("--dataset-name", "trace", "--dataset-path", str(trace), "--json", str(report))
        done = headrace_here("bench", "serve", "--url", server.url, *of_trace)
        assert [body["max_tokens"] for body in server.bodies] == [13, 14, 16]
    assert done.returncode == 0, done.stderr
    assert [each["intended_s"] for each in json.loads(report.read_text())["requests"]] == pytest.approx([0, 0.1, 0.3])


def test_interrupt_shows_what_was_measured_so_far(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    with foreign_server("good") as server:
        command = [sys.executable, "-m", "ops.cli", "bench", "serve", "--url", server.url, *FEW, "--json", str(report)]
        command += ["--requests", "100000", "--request-rate", "20"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert all(server.arrived.acquire(timeout=60) for _ in range(5))
                process.send_signal(signal.SIGINT)
                printed, _ = process.communicate(timeout=60)
            finally:
                process.kill()
    assert process.returncode == 130
    completed = json.loads(report.read_text())["summary"]["completed"]
    assert completed >= 3
    assert re.search(rf"^completed +{completed} of 100,000 ", printed, re.MULTILINE)
    assert re.search(rf"^not ended +{100_000 - completed:,}$", printed, re.MULTILINE)


def test_server_that_answers_nothing_is_told_before_the_run() -> None:
    done = serve("http://127.0.0.1:1", "--model", "m")
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, "")
    assert "the server does not answer a first request: no connection: " in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--goodput", "ttft:fast"), "--goodput: 'ttft:fast' is no limit like ttft:500"),
        (("--extra-body", "[]"), "--extra-body: '[]' is no JSON object"),
        (("--image-size", "0x4"), "--image-size: '0x4' is not a size of 1x1 to 8192x8192"),
        (("--images", "1"), "--images: needs --backend openai-chat"),
        (("--dataset-name", "trace"), "--dataset-path: is required for the dataset trace"),
        (("--turns", "3"), "--turns: is not read for the dataset random"),
        (("--prefixes", "3"), "--prefixes: is not read without --random-prefix-len"),
        (("--burstiness", "3"), "--burstiness: is not read without --request-rate"),
        (("--image-size", "4x4"), "--image-size: is not read without --images"),
        (("--dataset-name", "agents", "--spread", "1"), "--spread: is not read for the dataset agents"),
        (
            ("--dataset-name", "custom", "--dataset-path", "x", "--random-input-len", "3"),
            "--random-input-len: is not read for the dataset custom",
        ),
        (("--json", "/nowhere/x.json"), "--json: /nowhere/x.json cannot be written: No such file or directory"),
        (("--base-url", "x"), "No such option '--base-url' (vLLM's): use --url."),
        (("--random-range-ratio", "1"), "No such option '--random-range-ratio' (vLLM's): use --spread."),
        (("--bursiness", "1"), "No such option '--bursiness'. (Did you mean one of: '--burstiness', "),
    ],
)
def test_mistake_is_told_in_one_sentence(arguments: tuple[str, ...], told: str) -> None:
    done = headrace_here("bench", "serve", "--url", "http://127.0.0.1:1", "--model", "m", *arguments)
    assert done.returncode == 2
    assert told in done.stderr


def test_file_that_is_no_report_cannot_be_compared(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    done = headrace_here("bench", "compare", "a.json", "b.json", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "a.json is not a report of `headrace bench serve --json`" in done.stderr


def test_terminal_shows_a_line_that_is_cut_and_drawn_over_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = pty.openpty()
    fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 6, 0, 0))
    with open(writing, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        clock = Clock()
        line = StatusLine(clock)
        for text in ("first", "too soon"):
            line.show(text)
        clock.now += 2 * REDRAW_S
        line.show("longer than it is")
        line.clear()
        expected, shown = b"\r\x1b[Kfirst\r\x1b[Klonge\r\x1b[K", b""
        while len(shown) < len(expected) and select.select([reading], [], [], 60)[0]:
            shown += os.read(reading, 1000)
        assert shown == expected
    os.close(reading)


def test_no_terminal_gets_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    line = StatusLine(clock)
    for number in range(5):
        line.show(f"at {number}")
        clock.now += TELL_EVERY_S / 2
    line.clear()
    assert capsys.readouterr().err == "at 2\nat 4\n"
