"""The engine: runs scheduler and backend in a loop and hands tokens to those who asked for them."""
