"""Answers on their way to the client: choices, server-sent events, whole answers, and turns of the event loop."""
