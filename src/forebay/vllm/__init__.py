"""Look-ahead inside an unmodified vLLM, as a KV connector.

`connector` is what vLLM loads; of the rest only that module and `plugin` import vLLM. The half in
vLLM's scheduler (`scheduler`) decides, over vLLM's own block pool (`pool`), what the half in its
worker (`worker`) moves. What depends on vLLM's shape and version is in `adapter`; what is not
supported is refused at start (`refusals`).
"""
