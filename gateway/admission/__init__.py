"""Who may ask, how much, and when to return: keys, limits, shedding and promised places."""
