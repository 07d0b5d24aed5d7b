"""Streams requests from several threads and prints how each ended: `python fleet_load.py URL MODEL TOKENS SECONDS`.

Runs on a machine of its own, with the certificates in /etc/headrace/tls and the key in HEADRACE_API_KEY.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request

THREADS = 16


def stream_once(url: str, model: str, num_tokens: int, context: ssl.SSLContext) -> str:
    """Ask for a stream; return `whole`, or the error."""
    options = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    body = {"model": model, "prompt": f"x{time.monotonic()}", "max_tokens": num_tokens, **options}
    headers = {"Authorization": f"Bearer {os.environ['HEADRACE_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, context=context, timeout=60) as answer:
            lines = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
    except urllib.error.HTTPError as error:
        return f"error: {error.code}: {error.read().decode()}"
    except OSError as error:
        return f"error: {error!r}"
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    if errors := [chunk["error"] for chunk in chunks if "error" in chunk]:
        return f"error: {errors}"
    usage = next((chunk["usage"] for chunk in chunks if chunk.get("usage")), {})
    is_whole = lines[-1:] == ["[DONE]"] and usage.get("completion_tokens") == num_tokens
    return "whole" if is_whole else f"not whole: {usage}"


def main(url: str, model: str, num_tokens: int, seconds: float) -> None:
    """Load the system and print a JSON object of counts."""
    context = ssl.create_default_context(cafile="/etc/headrace/tls/ca.pem")
    context.load_cert_chain("/etc/headrace/tls/client.pem", "/etc/headrace/tls/client.key")
    counts: dict[str, int] = {}
    lock = threading.Lock()
    until = time.monotonic() + seconds

    def work() -> None:
        while time.monotonic() < until:
            ending = stream_once(url, model, num_tokens, context)
            with lock:
                counts[ending] = counts.get(ending, 0) + 1

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.stdout.write(json.dumps(counts))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
