"""What a model needs of devices: memory, time and money, by formulas whose sources are named."""
