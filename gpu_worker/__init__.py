"""The worker: pulls requests from NATS and generates tokens with its own continuous-batching engine."""
