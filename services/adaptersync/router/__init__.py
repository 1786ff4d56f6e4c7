"""OpenAI's API in front of all replicas: resolves names to versions, chooses replicas, keeps the ledger."""
