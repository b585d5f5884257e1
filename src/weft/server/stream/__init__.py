"""Sends answers to the client, as a stream of events or as one body, and shares the event loop between requests."""
