"""One file a group of ops: how each is checked, at which shapes it is timed, and beside what."""
