"""Models that are divided among ranks: the part of each, and sums and exchanges over all of them."""
