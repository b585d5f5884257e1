"""Runs batches: reads the lines of their input files, sends each to the server itself, and writes their output files."""
