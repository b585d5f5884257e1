"""Scripts that run in the environments of the peers. They do not import weft.

A server gets a port and runs until its standard input is closed. A driver reads one phase per line, as JSON with `items`
(`prompt` as token ids, `max_tokens`, `at` in seconds) and `one_by_one`. It answers each phase with one line: a list with
`began`, `tokens` (the time of each) and `ended` of every request, in seconds after the start of the phase.
"""
