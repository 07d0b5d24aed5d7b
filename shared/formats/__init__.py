"""How model families write reasoning and tool calls: one description each, its parser and its grammar. No torch."""
