"""Beside each vLLM server: make it hold what the table wants, and say truthfully what it holds.

`reconcile` compares desired with observed, `staging` brings bytes to local disk, `engine` loads and checks them,
`app` runs the loops.
"""
