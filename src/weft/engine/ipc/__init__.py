"""The engine in its own process: the messages, both ends of the connection, and the supervision of the process."""
