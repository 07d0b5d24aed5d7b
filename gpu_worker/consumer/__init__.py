"""Between NATS and the engine: pulls requests, admits them, publishes what the engine makes of them."""
