"""The engine: runs the scheduler and a backend in a loop, and delivers tokens to callbacks and streams."""
