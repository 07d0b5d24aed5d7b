"""The console at the operator's port: pages for people, and the answers in JSON that pages and commands read."""
