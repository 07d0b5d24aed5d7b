"""What the gateway and the workers agree on: messages, subjects, streams, configuration, errors, telemetry.

Nothing here imports torch, and nothing here imports the gateway or the worker.
"""
