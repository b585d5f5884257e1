"""Small programs that `python -m benchmarks peers` runs in the environments of others; none of them knows weft.

A server gets a port and runs until its input ends. A driver gets one phase of work a line on its input, as JSON with
`items` (`prompt` as token ids, `max_tokens`, `at` in seconds) and `one_by_one`, and answers each with one line: a
list with `began`, `tokens` (the time of each) and `ended` of every request, in seconds after the start of the phase.
"""
