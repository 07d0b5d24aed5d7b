"""The lives of requests: kept for a while by each gateway process, told to operators and to other gateways."""
