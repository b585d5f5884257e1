"""The benches: what the scheduler costs the host, what its plans are worth, and what the clients of a server see."""
