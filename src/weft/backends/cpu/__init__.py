"""The CPU backend: executes plans with the operations of `weft.ops`, in a thread of this process."""
