"""Sends answers to the client, as server-sent events or as one body, and shares the event loop between requests."""
