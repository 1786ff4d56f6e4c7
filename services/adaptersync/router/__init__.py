"""One OpenAI-compatible address for a fleet: resolves names to versions, chooses replicas, keeps the ledger."""
