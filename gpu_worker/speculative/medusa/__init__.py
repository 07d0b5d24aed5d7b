"""Medusa: each head predicts one token more, from the model's last hidden vector."""
