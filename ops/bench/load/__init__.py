"""Loads on gateways: clients of event streams, the systems that they drive, and floors to compare with."""
