"""Decides what each step computes, and which KV blocks it uses. Standard library only."""
