"""The families of models, by how they write arguments of calls."""
