"""What operators are told: rows of metrics, and what is measured of models, workers and streams."""
