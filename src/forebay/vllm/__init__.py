"""Look-ahead inside an unmodified vLLM, as a KV connector.

`connector` is what vLLM loads; besides it only `seen.metrics`, `seen.kv_events` and `plugin` import
vLLM. The half in vLLM's scheduler (`scheduler`) decides, over vLLM's own block pool, what the half
in its worker (`worker`) moves; where both are in one process they are a `pair`. What depends on
vLLM's shape and version is in `adapter`; what is not supported is refused at start (`refusals`).
`seen` is what operators and routers are told.
"""
