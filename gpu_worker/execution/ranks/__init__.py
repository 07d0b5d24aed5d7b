"""A worker of several ranks on one host: rank 0 plans, and every rank computes the plans with its part of the model."""
