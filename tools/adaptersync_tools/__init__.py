"""The operator's command line, the replica simulator and the benches."""
