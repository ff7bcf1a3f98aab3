"""The half in vLLM's scheduler: what decides.

`half` ties it together. `pool` is vLLM's block pool as the core knows one, `naming` puts what vLLM
computes into the directory, `copies` follows what the worker moves (told by `mailbox`; where there
are several workers, by `agreement`). Whom vLLM has, who waits and when its turn comes: `records`,
`roster`, `turns`, `near`, `lookups`, `last_block`, `lately`. `guard` keeps what is leased out of
vLLM's way. What requests and operators may ask for: `wishes`, `hints`, `control`. `books` counts.
"""
