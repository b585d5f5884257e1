"""The real engine on a virtual clock: seeded scenarios, checked after every step against what must always hold."""
