"""Options of Ollama."""

from __future__ import annotations

# What is said, and the options of which it is said.
ROWS: tuple[tuple[str, str], ...] = (
    ("a worker keeps its model until it ends: leave it out", "--keepalive --keep-alive"),
    ("a request asks for it: `response_format`", "--format"),
    ("a request asks for it: `reasoning_effort`", "--think --hidethinking"),
    ("set HF_ENDPOINT for a mirror of the hub", "--insecure"),
    ("--max-model-len", "--num-ctx"),
    ("--device cpu or cuda; a model runs on one of them as a whole", "--num-gpu"),
    ("--num-threads", "--num-thread"),
    ("--max-num-seqs", "--num-parallel"),
)
