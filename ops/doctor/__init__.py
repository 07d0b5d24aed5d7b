"""Looks at an installation and says what is wrong with it, and what to do."""
