"""Runs the engine in a process of its own: messages, both ends of the connection, supervision of the process."""
