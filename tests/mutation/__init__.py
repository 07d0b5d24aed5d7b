"""Mutation tests: change one line of the code at a time and see whether a test notices."""
