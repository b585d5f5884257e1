"""HTTP: the protocol, access control, request bodies, memory budgets and the access log."""
