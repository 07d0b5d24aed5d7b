"""Metrics for operators: their rows, and measurements of models, workers and streams."""
