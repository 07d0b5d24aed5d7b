"""Chaos: break the whole system on purpose, and check that it kept every promise.

A *scenario* starts a *system* of real processes, puts a *load* on it that writes a *ledger*, lets *faults* happen, and
checks the ledger and the system afterwards. `make chaos` runs scenarios from the command line (ARGS="--help"), and
`tests/chaos/test_scenarios.py` runs short ones in pytest.
"""
