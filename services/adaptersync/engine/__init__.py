"""What runs inside a vLLM server: a door for its HTTP front, an auditor for its workers.

vLLM imports both by name (`--middleware adaptersync.engine.door.Door`,
`--worker-extension-cls adaptersync.engine.audit.Auditor`). They know vLLM's objects by their attributes and import
nothing of it.
"""
