"""Benchmarks that only maintainers run, from a clone: .venv/bin/python -m benchmarks NAME. Not part of the wheel."""
