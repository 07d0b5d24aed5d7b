"""Event streams: their bytes between sinks and connections, and the words of each family of APIs."""
