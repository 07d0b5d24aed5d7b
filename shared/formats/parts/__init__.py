"""The parts of which a call is made. Each reads itself, and says itself as a grammar."""
