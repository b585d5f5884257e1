"""Text work outside the event loop: tokenising, grammar checks, and the processes that do them."""
