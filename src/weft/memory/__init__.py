"""Reads documents, splits them into passages, and finds passages by meaning and by words. Knows neither HTTP nor SQLite."""
