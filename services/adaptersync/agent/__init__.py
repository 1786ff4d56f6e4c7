"""Beside each vLLM server: make it hold what the table wants, and say truthfully what it holds.

`reconcile` compares desired with observed, `staging` brings bytes to local disk, `engine` loads and checks them,
`app` runs the loops. Beside them `kv_follow` keeps what routers know of the engine's prefix cache equal to what is in
it: `kv_line` takes events from the wire, `kv_events` reads them, `cached` makes of them what is there, `owned` says so.
"""
