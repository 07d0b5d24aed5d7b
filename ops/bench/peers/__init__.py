"""Other projects, measured beside ours: engines, servers and a loader, each installed and run as its users do."""
