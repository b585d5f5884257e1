"""The backends: they execute plans and return sampled tokens. The engine imports only `base` and `registry`."""
