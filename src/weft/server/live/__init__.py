"""Serves live data: the frames of the engine for the page at `/`, completed by what only the server knows."""
