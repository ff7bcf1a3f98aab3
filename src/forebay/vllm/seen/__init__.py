"""What others see of the connector: metrics in vLLM's `/metrics`, and KV events."""
