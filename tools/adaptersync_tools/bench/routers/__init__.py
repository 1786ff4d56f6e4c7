"""Our router beside others: what is asked of them, in one run and on the same replicas.

`replica` is what they route to, `load` what clients send, `parties` who is measured, `cases` what is measured, `run`
goes through all of it, `judge` says what is promised, `report` prints it. `hf_rule` is one of the parties.
"""
