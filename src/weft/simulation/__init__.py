"""Runs the real engine on a virtual clock, over seeded scenarios, and checks invariants after every step."""
