"""Runs the llama.cpp server of xllamacpp until standard input is closed. Arguments: MODEL SLOTS CONTEXT PORT."""

import sys

import xllamacpp

model, slots, context, port = sys.argv[1], *map(int, sys.argv[2:])
parameters = xllamacpp.CommonParams()
parameters.model.path = model
parameters.n_parallel = slots
parameters.n_ctx = slots * context
parameters.port = port
server = xllamacpp.Server(parameters)
sys.stdin.read()
