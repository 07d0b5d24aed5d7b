"""The families of models, one description a file."""
