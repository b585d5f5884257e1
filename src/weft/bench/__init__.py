"""The benches: what the scheduler costs the host, and what its plans are worth on a device of known speed."""
