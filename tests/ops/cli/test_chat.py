import base64
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ops.cli import chat
from ops.cli.chat import ChatConfig
from ops.cli.running_system import Endpoint, ServerRefusedError, only_model
from shared.bounds import MAX_IMAGE_BYTES
from shared.errors import ConfigError
from tests.images import png_of_size
from tests.integration.system import System
from tests.ops.cli.command import headrace


def test_prompt_is_continued_once(state_dir: Path) -> None:
    done = headrace("chat", "def f(x):", "--max-tokens", "5", "--state-dir", str(state_dir))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_server_can_be_named_instead_of_found(cli_system: System, tmp_path: Path) -> None:
    variables = {"HEADRACE_URL": f"{cli_system.url}/v1", "HEADRACE_API_KEY": cli_system.info["api_key"]}
    done = headrace("chat", "x", "--max-tokens", "2", cwd=tmp_path, **variables)
    assert (done.returncode, bool(done.stdout.strip())) == (0, True), done.stderr


def test_conversation_answers_each_line_until_its_input_ends(state_dir: Path) -> None:
    done = headrace("chat", "--max-tokens", "3", "--state-dir", str(state_dir), given="hello\n\nagain\n")
    assert done.returncode == 0, done.stderr
    # Four prompts; an answer may look like one.
    assert re.fullmatch(r"> .+\n> > .+\n> \n", done.stdout, re.DOTALL)
    assert "headrace-demo at http://" in done.stderr


def test_interrupt_stops_an_answer_and_the_conversation_goes_on(state_dir: Path) -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "ops.cli", "chat", "--max-tokens", "2000", "--state-dir", str(state_dir)]
    with subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, start_new_session=True) as chat:
        os.close(follower)
        try:
            _read_until(leader, b"> ")
            os.write(leader, b"hello\n")
            _read_until(leader, b"hello\r\n")
            assert os.read(leader, 100)
            chat.send_signal(signal.SIGINT)
            _read_until(leader, rb"\[stopped\].*> ")
            os.write(leader, b"\x04")
            assert chat.wait(10) == 0
        finally:
            chat.kill()
            os.close(leader)


def test_refusal_is_told_in_the_servers_words(cli_system: System, tmp_path: Path) -> None:
    done = headrace("chat", "x", "--url", cli_system.url, "--api-key", "wrong", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "the server answers 401: Incorrect API key provided" in done.stderr
    # The option was given, so the remedy names it.
    assert "Give yours as --api-key; it is sent as `Authorization: Bearer <key>`." in done.stderr


def test_model_that_is_not_served_is_answered_with_those_that_are(state_dir: Path) -> None:
    done = headrace("chat", "x", "--model", "nobody", "--state-dir", str(state_dir))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "the server answers 404: The model `nobody` does not exist or you do not have access" in done.stderr
    assert done.stderr.endswith("Here that is headrace-demo; name it as --model.\n")
    talked = headrace("chat", "--model", "nobody", "--state-dir", str(state_dir), given="hello\n")
    assert "Here that is headrace-demo; name it as --model." in talked.stderr


def test_several_served_models_are_named_and_none_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    served = {"one": "one", "two": "two", "alias": "one"}
    monkeypatch.setattr(Endpoint, "roots", lambda endpoint: served)
    with pytest.raises(ConfigError, match="HEADRACE_MODEL_NAME: not set, and 2 models are served: one, two; name one"):
        chat.run(ChatConfig(url="http://127.0.0.1:1"), "x")
    del served["two"]
    assert only_model(Endpoint("http://127.0.0.1:1", None)) == "one"


def test_answer_that_breaks_off_is_not_taken_for_a_whole_one() -> None:
    chunk = b'data: {"choices":[{"index":0,"text":"half an ans"}]}\n\n'
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

    def answer_half(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(head + b"%x\r\n%b\r\n" % (len(chunk), chunk))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer_half, args=(listener,))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        done = headrace("chat", "x", "--model-name", "m", "--url", url)
        thread.join()
    assert done.stdout.startswith("half an ans")
    assert (done.returncode, "broke off" in done.stderr) == (2, True), done.stderr


def test_all_images_are_sent_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    posted: list[dict[str, Any]] = []

    def stream(endpoint: Endpoint, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        posted.append(body)
        yield {"choices": [{"delta": {"content": "seen"}}]}

    monkeypatch.setattr(Endpoint, "stream", stream)
    for name, width in (("a.png", 10), ("b.png", 20)):
        (tmp_path / name).write_bytes(png_of_size(width, 2))
    files = [str(tmp_path / name) for name in ("a.png", "b.png")]
    given = ["x", "--url", "http://127.0.0.1:1", "--model", "m", "--image", files[0], "--image", files[1]]
    done = CliRunner().invoke(chat.command, [*given, "--image", "https://x.example.com/c.png"])
    assert (done.exit_code, done.output) == (0, "seen\n")
    *images, text = posted[0]["messages"][0]["content"]
    urls = [image["image_url"]["url"] for image in images]
    assert [base64.b64decode(url.partition(",")[2]) for url in urls[:2]] == [Path(file).read_bytes() for file in files]
    assert (urls[2], text) == ("https://x.example.com/c.png", {"type": "text", "text": "x"})


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (bytes(4) + b"ftypheic" + bytes(20), "is of the format HEIC; convert it to JPEG first"),
        (b"\xff\xd8\xff" + bytes(MAX_IMAGE_BYTES), f"has more than {MAX_IMAGE_BYTES} bytes"),
    ],
    ids=["of an iPhone", "too large"],
)
def test_file_that_no_server_reads_is_refused_by_name(content: bytes, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "image"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(f"HEADRACE_IMAGE: {file} {problem}")):
        chat.run(ChatConfig(url="http://127.0.0.1:1"), "x", [str(file)])


def test_conversation_goes_on_without_an_image_that_was_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    posted: list[list[dict[str, Any]]] = []

    def stream(endpoint: Endpoint, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        posted.append(list(body["messages"]))
        if len(posted) == 1:
            raise ServerRefusedError(400, "it reads text alone")
        yield {"choices": [{"delta": {"content": "seen"}}]}

    monkeypatch.setattr(Endpoint, "stream", stream)
    given = ["--url", "http://127.0.0.1:1", "--model", "m", "--image", "https://x.example.com/c.png"]
    done = CliRunner().invoke(chat.command, given, input="look\nagain\n")
    assert done.exit_code == 0, done.output
    assert "it reads text alone" in done.output
    assert posted[1] == [{"role": "user", "content": "again"}]


def _read_until(leader: int, pattern: bytes) -> None:
    seen = b""
    while not re.search(pattern, seen, re.DOTALL):
        readable, _, _ = select.select([leader], [], [], 15)
        assert readable, seen
        seen += os.read(leader, 1000)


def test_ready_file_that_is_damaged_or_of_another_version_is_one_line(tmp_path: Path) -> None:
    texts = {'{"url": "http://127.0.0.1:1"}': "it is not of this version", "{": "it is not JSON"}
    for text, why in texts.items():
        (tmp_path / "ready.json").write_text(text)
        done = headrace("chat", "x", "--state-dir", str(tmp_path))
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert f"ready.json cannot be read: {why}; start `headrace up` anew" in done.stderr
