"""What happens once, in order: settings, model, runner, proposer, engine, worker; and the process from start to end."""
