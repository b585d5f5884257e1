"""Serves live data: the frames of the engine for the page at `/`, with the keys and the held requests that the server adds."""
