"""A day of an operator, rehearsed: hosts, an installation, and what happens to it while clients ask."""
