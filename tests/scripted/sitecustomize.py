"""Registers the scripted backend in every process of a server that a test starts with this folder on its path."""

from weft.backends import registry

registry.BUILDERS["scripted"] = ("scripted_backend", "open_scripted_backend")
