"""Operations: the command line, the embedded stack, deploy files, the demo model, benchmarks, decisions."""
