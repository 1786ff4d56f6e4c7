"""A task small enough to learn on two CPU cores, to see the whole loop work on real TRL and real vLLM."""
