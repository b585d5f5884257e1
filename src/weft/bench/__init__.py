"""`weft bench`: measures servers (serve, soak, start, overhead) and the engine on a GPU (gpu)."""
