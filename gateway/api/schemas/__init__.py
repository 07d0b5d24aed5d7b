"""From a request body to a `Generation`, or to a 400 that names the field and the limit. Pure functions."""
