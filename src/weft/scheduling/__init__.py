"""The brain: decides what every step computes and where it lives in the cache. Standard library only."""
