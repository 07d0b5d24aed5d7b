"""The whole system as child processes of one supervisor, on loopback: what `headrace up` runs."""
