"""What operators see: rows of metrics and their collectors, the reference page of them, request lines, traces."""
