"""Whole steps of the engine, with random weights made on the device.

Needs what the engine needs, so nothing here is imported before its turn comes.
"""
