"""Break a simulated fleet for a while, in every part and at every moment, and watch whether its promises hold.

`plan` says what breaks when, from a seed; `strike` does it; `traffic` asks as rollout workers do; `watch` reads the
events, `history` and `names` judge by them; `probe` looks at the replicas past the router; `drive` puts them together;
`audit` asks the fleet's own ledger; `report` is what comes of it. Run it as `tools/chaos`.
"""
