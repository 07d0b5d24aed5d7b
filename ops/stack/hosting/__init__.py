"""Hosts: keep the worker processes of one machine in line with the models that it is to serve."""
