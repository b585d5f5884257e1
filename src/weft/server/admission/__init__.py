"""Admission: active requests, API keys, rate limits, and fairness between keys."""
