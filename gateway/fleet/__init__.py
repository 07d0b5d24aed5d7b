"""The workers and the other gateways, as their heartbeats show them."""
