"""Options and commands of other servers: whoever types one is told what stands for it here, or why nothing does."""
