"""Reading the ledger's archive: what a run's rollouts were, and whether anything contradicts anything.

Offline: of the store alone, without Redis or a fleet.
"""
