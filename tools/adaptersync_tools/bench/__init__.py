"""The project's figures, each measured by one command: `adaptersync bench NAME`.

A bench starts what it needs, measures, prints and leaves nothing behind. Machines differ and are shared, so a figure
is judged against another one of the same run: what is promised is a ratio. `result.py` is what all benches end in,
`cli/bench.py` has their commands; one module a bench says what is measured, and how.
"""
