"""What users do wrong: each ends with one clear line that names what to change, and never with a traceback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ops import cli
from ops.stack.config import DEMO_MODEL
from tests.servers import NatsServer

MODEL = str(DEMO_MODEL)
NOWHERE = ("--nats-url", "nats://127.0.0.1:1")
NO_AUDIT = ("--audit-file", os.devnull)
BLOOM = {"architectures": ["BloomForCausalLM"], "hidden_size": 8, "n_layer": 1, "n_head": 1, "vocab_size": 9}
UP = ("up", "--state-dir", "{files}/state", "--port", "0", "--simulate", "5")
GATEWAY = ("gateway", "--api-key", "k", "--port", "0", *NOWHERE)
QUANTIZE = ("quantize", "--method", "int8")

# (arguments, part of the message); {files} is a folder with the files below.
MISTAKES: list[tuple[tuple[str, ...], str]] = [
    (("worker",), "--model: is required"),
    (("worker", "--model", "{files}/none"), "--model: {files}/none does not exist; name a folder"),
    (
        ("worker", "--model", "{files}/empty"),
        "--model: {files}/empty has no config.json and is no .gguf file; name a folder",
    ),
    (("worker", "--model", "{files}/adapter"), "adapter holds an adapter alone; merge it into its model's weights"),
    (("worker", "--model", "{files}/torn/config.json"), "or an id at the hub; did you mean {files}/torn?"),
    (("worker", "--model", "{files}/torn"), "; copy it again from where the model came from"),
    (("worker", "--model", "{files}/bloom"), "unsupported architecture ('BloomForCausalLM'); ops/docs/models.md lists"),
    (("worker", "--model", "{files}/torn.gguf"), "torn.gguf: the magic number needs 4 bytes"),
    (("worker", "--model", MODEL, "--max-model-len", "1"), "--max-model-len: 1 is too small; the least allowed is 2"),
    (("worker", "--model", MODEL, "--max-model-len", "9999"), "--max-model-len: is 9999, but the model was made for"),
    (("worker", "--model", MODEL, "--num-blocks", "99999999"), "--num-blocks: a KV cache of 99999999 blocks needs"),
    (("worker", "--model", MODEL, "--kv-cache-bytes", "1" + "0" * 13), "--kv-cache-bytes: a KV cache of"),
    (("worker", "--model", MODEL, "--kv-cache-bytes", "5"), "--kv-cache-bytes: the KV cache would hold 0 tokens"),
    (("worker", "--model", MODEL, "--max-num-batched-tokens", "1"), "--max-num-batched-tokens: max_num_batched"),
    (("worker", "--model", MODEL, "--dtype", "int4"), "--dtype: 'int4' is not one of auto, float32"),
    (("worker", "--model", MODEL, "--device", "cuda"), "--device: is cuda, but PyTorch finds no CUDA device"),
    (("worker", "--model", MODEL, "--speculative", "draft"), "--draft-model: is needed with --speculative=draft"),
    (("worker", "--model", MODEL, "--draft-model", MODEL), "--draft-model: is set, but --speculative is off"),
    (("worker", "--model", MODEL, "--nats-url", "ws://127.0.0.1"), "--nats-url: begins with ws://; allowed: nats, tls"),
    (("worker", "--model", MODEL, "--nats-ca-file", "{files}/none"), "--nats-ca-file: "),
    (("gateway", "--port", "0", *NOWHERE), "--keys-file: no key file is set, and --api-key is empty"),
    (("gateway", "--port", "0", "--keys-file", "{files}/none", *NOWHERE), "--keys-file: {files}/none does not exist"),
    (("gateway", "--api-key", "k", "--port", "99999"), "--port: 99999 is too large; the most allowed is 65535"),
    (("gateway", "--api-key", "k", "--port", "{taken}"), "--port: 127.0.0.1:{taken} cannot be used"),
    (("gateway", "--api-key", "k", "--port", "0", "--operator-port", "0"), "--operator-key: not set"),
    (
        ("gateway", "--api-key", "k", "--port", "9", "--operator-port", "9", "--operator-without-key"),
        "--operator-port: 9 is --port too; choose another",
    ),
    ((*GATEWAY, "--redis-url", "redis://h?foo=1"), "--redis-url: has an option behind its ? that cannot be used: "),
    ((*GATEWAY, "--processes", "2", "--otlp-endpoint", "h:4318"), "--otlp-endpoint: is 'h:4318'; allowed: a URL"),
    (
        ("gateway", "--api-key", "k", "--nats-url", "nats://::1:4222"),
        "--nats-url: is not a host and port; write nats://h",
    ),
    (("worker", "--model", "{files}/above"), "an id at the hub; did you mean {files}/above/model?"),
    (("perplexity", "--model", "{files}/above", "--text", "{files}/text.txt"), "; did you mean {files}/above/model?"),
    (("up", "--state-dir", "{files}/text.txt"), "--state-dir: {files}/text.txt cannot be used"),
    (("up", "--ready-file", "{files}/none/ready"), "--ready-file: {files}/none is not a directory"),
    (("up", "--state-dir", "{files}/state", "--port", "{taken}"), "--port: port {taken} is taken"),
    ((*UP, "--cors-origins", "chat.example.com"), "--cors-origins: 'chat.example.com' is not an origin"),
    (("up", "--state-dir", "/dev/null"), "--state-dir: /dev/null cannot be used: it, or a folder above it, is a file"),
    ((*UP, "--operator-key", "short"), "--operator-key: has fewer than 16 characters"),
    ((*UP, "--keys-file", "{files}/keys3.json"), "--keys-file: {files}/keys3.json, line 2: not JSON"),
    ((*QUANTIZE, "--model", MODEL), "--out: is required"),
    ((*QUANTIZE, "--model", MODEL, "--out", MODEL), "--out: is the model's own folder"),
    ((*QUANTIZE, "--model", MODEL, "--out", "{files}/text.txt/q"), "--out: {files}/text.txt/q cannot be written"),
    ((*QUANTIZE, "--model", MODEL, "--out", "{files}"), "--out: {files} exists and is not empty"),
    ((*QUANTIZE, "--model", "{files}/torn.gguf", "--out", "{files}/q"), "torn.gguf is a GGUF file, which is served"),
    (
        ("quantize", "--method", "gptq", "--model", MODEL, "--out", "{files}/q"),
        "--calibration: is required by gptq",
    ),
    (
        ("quantize", "--method", "rtn-int4", "--model", MODEL, "--out", "{files}/q", "--group-size", "33"),
        "--group-size: is 33, which must divide",
    ),
    (("perplexity", "--model", MODEL), "--text: is required"),
    (("perplexity", "--model", MODEL, "--text", "{files}/none"), "--text: {files}/none cannot be read"),
    (("bench", "engine"), "--model: is required"),
    (
        ("bench", "engine", "--model", MODEL, "--json", "{files}/none/results"),
        "--json: {files}/none/results cannot be written: No such file",
    ),
    (("bench", "engine", "--model", MODEL, "--batch", "x"), "--batch: 'x' is not a list of batch sizes"),
    (
        ("keys", "--keys-file", "{files}/keys2.json", "list"),
        "--keys-file: {files}/keys2.json, key 2 (key_b): 'requests_per_minute' is invalid: expected integer >= 1",
    ),
    (("keys", "--keys-file", "{files}/keys3.json", "list"), "--keys-file: {files}/keys3.json, line 2: not JSON"),
    (("keys", "--keys-file", "{files}/keys4.json", "list"), "keys4.json, key 1 (a): 'sha256' is missing"),
    (("keys", "--keys-file", "{files}/none.json", "create"), "--keys-file: {files}/none.json is empty; a file without"),
    (("keys", "create", "--tenant", ""), "Invalid value for '--tenant': name '' must be 1 to 128 bytes"),
    (("worker", "--model", MODEL, "--worker-id", "w" * 200), "--worker-id: name 'wwww"),
    (("chat", "hi", "--state-dir", "{files}/empty"), "--url: not set, and no `headrace up` runs on"),
    (("chat", "hi", "--url", "127.0.0.1:8000"), "--url: '127.0.0.1:8000' is no URL of a server; write http://"),
    (("chat", "hi", "--url", "http://127.0.0.1:1"), "http://127.0.0.1:1 does not answer"),
    (("dead", "--state-dir", "{files}/empty", "list"), "--nats-url: not set"),
    (("tenant", "acme", "--nkey", "x"), "--nkey: a user's public NKey is"),
    (("dead", "list", "--state-dir", "x"), "It belongs before the command: headrace dead --state-dir ..."),
    (
        ("keys", "--keys-file", "{files}/text.txt/k.json", "--audit-file", "/dev/null", "create"),
        "--keys-file: {files}/text.txt/k.json cannot be written: ",
    ),
    (("keys", "--keys-file", "{files}/keys.json", "revoke", "nobody"), "nobody"),
    (("keys", "--keys-file", "{files}/k.json", "--audit-file", "{files}", "create"), "--audit-file: {files} cannot be"),
    (("help", "wroker"), "No such command 'wroker'. Did you mean 'worker'?"),
    (("run", "Qwen/Qwen3-0.6B"), "`headrace up --model Qwen/Qwen3-0.6B`, then talk to it with `headrace chat`"),
    (("--model", "x"), "No such option '--model'. Options stand behind a command: headrace up ..."),
    (("worker", "--data-parallel-size", "2"), "size' (vLLM's): start more workers"),
    (("worker", "--eplb-config", "x"), "config' (vLLM's): use --num-redundant-experts and --eplb-step-interval."),
    (("up", "--trust_remote_code"), "code' (vLLM's): code of a checkpoint is never run: leave it out."),
    (("up", "Qwen/Qwen3-0.6B"), "a model is named as --model."),
    (("up", "--enable-prefix-caching", "true"), "extra argument (true). Each option has one value and a switch none"),
    (("up", "--processes", "2"), "'--processes': `headrace up` chooses this itself; --gateways says how many"),
    (("up", "--health-port", "1"), "`headrace up` chooses this itself; `headrace worker` has it"),
    (("up", "--ready-file", "{files}"), "--ready-file: {files} is a directory; name a file"),
    (("chat", "two", "words"), "extra argument (words). A prompt of several words stands in quotes."),
    (
        ("worker", "--model", MODEL, "--health-port", "0", "--health-host", "256.1.1.1"),
        "--health-host: 256.1.1.1:0 cannot be used: ",
    ),
    (("up", "-tp", "2"), "No such option '-tp' (vLLM's): use --tensor-parallel-size"),
    (
        ("worker", "--model", MODEL, "--gpu-memory-utilization", "90%"),
        "utilization: '90%' is not a number",
    ),
    (
        ("keys", "limit", "t", "--weight", "2"),
        "'--weight'. It is an option of `headrace keys create` and `head",
    ),
    (("cache", "state"), "No such command 'state'. Did you mean 'stats'?"),
    (("cache", "stats"), "--operator-url: not set, and no `headrace up` runs on .headrace"),
    (("keys", "create", "--max-conc", "1"), "No such option '--max-conc'. Did you mean '--max-concurrent'?"),
    (("setup", *NOWHERE, *NO_AUDIT, "--tenants", "a," + "x" * 200), "must be 1 to 128 bytes long"),
    (
        ("setup", *NOWHERE, *NO_AUDIT, "--nats-key-file", "{files}/text.txt"),
        "key-file: needs --nats-cert-file beside it",
    ),
    (("setup", *NOWHERE, *NO_AUDIT, "--timeout-s", "0.5"), "did not answer within 0.5 s"),
    (("batch", "list", "--tenant", ""), "Invalid value for '--tenant': name '' must be 1 to 128 bytes long"),
    (("batch", "cancel", "some-id", ""), "An id is empty; `headrace batch list` shows those of batches"),
    (("batch", "cancel"), "Give ids of jobs, or --all"),
    (("batch", "ls"), "Did you mean 'list'?"),
    (("dead", "retry", "one", "--all"), "Give request ids, or --all"),
    (("keys", "create", "--weight", "0"), "Invalid value for '--weight': 0.0 is not in the range 0.01<=x<=100"),
    (("keys", "create", "--expires", "soon"), "write 30d, 12h, 90m, a day such as 2027-01-31, or never"),
    (("detect", "{files}/text.txt", "--key-file", "k"), "--model: is required"),
    (("detect", "{files}/text.txt", "--model", MODEL, "--key-file", "{files}/none"), "{files}/none cannot be read"),
    (("detect", "{files}/text.txt", "--model", MODEL, "--key-file", "{files}/text.txt"), "line 1: not a key of 64"),
    (("cache", "ls", "--kv-disk-path", "{files}/none"), "is not a directory"),
    (("cache", "clear"), "--kv-disk-path"),
    (("request", "--slow", "--failed"), "Give --slow or --failed, not both."),
    (("request", "some-id", "--slow"), "--slow lists requests; leave it out to see 'some-id', or give no ID."),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    for name in ("empty", "torn", "bloom"):
        (folder / name).mkdir()
    for name, config in (("torn", "{"), ("bloom", json.dumps(BLOOM))):
        (folder / name / "config.json").write_text(config)
        (folder / name / "tokenizer.json").write_bytes((DEMO_MODEL / "tokenizer.json").read_bytes())
    (folder / "above" / "model").mkdir(parents=True)
    (folder / "above" / "model" / "config.json").write_text("{}")
    (folder / "torn.gguf").touch()
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    (folder / "none.json").touch()
    (folder / "text.txt").write_text("some text\n" * 20)
    keys = [{"id": f"key_{name}", "sha256": "0" * 64, "tenant": "t"} for name in "ab"]
    (folder / "keys2.json").write_text(json.dumps([keys[0], {**keys[1], "requests_per_minute": 0}]))
    (folder / "keys3.json").write_text('[\n{"id" "a"}]')
    (folder / "keys4.json").write_text('[{"id": "a", "tenant": "t"}]')
    return folder


@pytest.fixture(scope="module")
def taken() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs a command in this process, and returns its exit status and what it wrote to standard error."""
    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), capfd.readouterr().err

    return run


# Found in a process of its own, before anything is started; it imports what a worker does.
MISTAKES_OF_WORKERS = [
    ((*UP, "--speculative", "ngram"), "--speculative: is ngram, but a simulated engine has no model"),
    ((*UP, "--worker-id", "w" * 200), "must be 1 to 128 bytes long"),
    ((*UP[:-2], "--model", "{files}/bloom"), "unsupported architecture ('BloomForCausalLM')"),
    ((*UP[:-2], "--model", "{files}/torn.gguf"), "torn.gguf: the magic number needs 4 bytes"),
    ((*UP[:-2], "--kv-cache-bytes", "5"), "--kv-cache-bytes: the KV cache would hold 0 tokens"),
    ((*UP[:-2], "--model", MODEL, "--max-model-len", "9999"), "--max-model-len: is 9999, but the model was made for"),
    ((*UP[:-2], "--speculative", "draft", "--draft-model", "{files}/none"), "--draft-model: {files}/none is not a dir"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"), MISTAKES_OF_WORKERS, ids=[" ".join(case[0])[-60:] for case in MISTAKES_OF_WORKERS]
)
def test_mistake_of_a_worker_is_found_before_anything_starts(
    arguments: tuple[str, ...], message: str, files: Path, command_line: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    status, text = command_line(*(argument.format(files=files) for argument in arguments))
    # A slow machine tells every few seconds what it waits for.
    lines = [line for line in text.splitlines() if "waiting for" not in line]
    assert (status, len(lines)) == (2, 1)
    assert message.format(files=files) in lines[0]
    assert not list((files / "state" / "logs").iterdir())


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(case[0])[-60:] for case in MISTAKES])
def test_mistake_is_one_clear_line(
    arguments: tuple[str, ...],
    message: str,
    files: Path,
    taken: int,
    nats_url: str,
    command_line: Callable[..., tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "worker":
        monkeypatch.setenv("HEADRACE_NATS_URL", nats_url)
    names = {"files": files, "taken": taken}
    status, text = command_line(*(argument.format(**names) for argument in arguments))
    last = text.strip().splitlines()[-1]
    assert status in (1, 2)
    assert message.format(**names) in last
    assert "Traceback" not in text
    # Besides the line itself only the log of a server may be there, and click's advice to read the help.
    stray = [
        line for line in text.splitlines()[:-1] if not line.startswith(("20", "Usage: ", "Try 'headrace")) and line
    ]
    assert stray == []


def test_wrong_password_is_found_before_the_model_is_loaded(
    start_nats: Callable[..., NatsServer], command_line: Callable[..., tuple[int, str]], files: Path
) -> None:
    nats = start_nats("--user", "worker", "--pass", "right")
    login = ("--nats-url", nats.url, "--nats-user", "worker", "--nats-password", "wrong")
    status, text = command_line("worker", "--model", str(files / "none"), *login)
    assert status == 2
    assert "refuses the user or password: check --nats-user and --nats-password" in text
    assert str(files / "none") not in text


def test_tls_url_of_a_server_without_tls_is_refused_before_anything_is_sent(
    nats_url: str, command_line: Callable[..., tuple[int, str]]
) -> None:
    login = ("--nats-url", nats_url.replace("nats://", "tls://"), "--nats-user", "u", "--nats-password", "p")
    status, text = command_line("worker", "--model", MODEL, *login)
    assert (status, text.count("\n")) == (2, 1)
    assert "does not offer TLS, which tls:// requires; nothing was sent to it" in text


def test_nats_without_jetstream_is_told_from_a_role_that_may_not(
    tmp_path: Path, command_line: Callable[..., tuple[int, str]]
) -> None:
    with NatsServer(tmp_path, has_jetstream=False).running() as server:
        status, text = command_line("setup", "--nats-url", server.url, "--audit-file", os.devnull)
    assert status == 2
    assert "NATS runs without JetStream: start it with JetStream enabled" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ("worker", "--model", MODEL, "--simulate", "5", *NOWHERE),
        pytest.param(("gateway", "--api-key", "k", "--port", "0", *NOWHERE), marks=pytest.mark.slow),
        pytest.param(("setup", *NOWHERE), marks=pytest.mark.slow),
    ],
)
def test_interrupt_while_waiting_for_nats_ends_at_once(arguments: tuple[str, ...], tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    command = [sys.executable, "-m", "ops.cli", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environ, text=True) as process:
        assert process.stderr is not None
        first_line = process.stderr.readline()  # its imports are over, and it waits or is about to
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, text = process.communicate(timeout=60)
    # A run that waits to the end has another status; a shell shows the end by the signal itself as 130 too.
    assert process.returncode in (0, 130, -signal.SIGINT)
    assert "Traceback" not in first_line + text


@pytest.mark.parametrize("module", ["ops.cli.command_line", "ops.cli.group"])
def test_ctrl_c_while_the_commands_are_imported_leaves_no_traceback(
    module: str, command_line: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted:
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, module, Interrupted())  # type: ignore[arg-type]
    assert command_line("--version") == (130, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_cannot_be_written_is_one_line() -> None:
    command = [sys.executable, "-m", "ops.cli", "--version"]
    with Path("/dev/full").open("wb", buffering=0) as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    line = "headrace: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, line)


def test_working_directory_that_is_gone_is_one_line(
    command_line: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    status, text = command_line("doctor")
    assert (status, text) == (2, "headrace: the working directory does not exist any more; change to one that does\n")
