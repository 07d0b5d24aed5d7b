"""Admission: API keys, limits, load shedding and promised places."""
