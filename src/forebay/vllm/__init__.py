"""Look-ahead inside an unmodified vLLM, as a KV connector.

`connector` is what vLLM loads; besides it only `metrics`, `kv_events` and `plugin` import vLLM. The
half in vLLM's scheduler (`scheduler`) decides, over vLLM's own block pool (`pool`), what the half
in its worker (`worker`) moves. What depends on vLLM's shape and version is in `adapter`; what is
not supported is refused at start (`refusals`). `wishes`, `hints` and `control` are what requests
and operators can say to it; `measures` and `events` what they hear of it.
"""
