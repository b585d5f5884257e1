"""What only maintainers measure. Called from a clone: .venv/bin/python -m benchmarks NAME. Not part of the wheel."""
