"""The backends: whatever turns a plan into sampled tokens. The engine knows `base` and asks `registry` for one."""
