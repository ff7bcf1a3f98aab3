"""Look-ahead KV-cache prefetching for LLM serving."""
