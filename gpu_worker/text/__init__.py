"""Text on the way in and out: tokenizer, chat template, incremental detokenization, stop strings."""
