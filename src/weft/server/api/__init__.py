"""The APIs: types of requests and responses, API formats, routes, the OpenAPI document.

The folder is flat, because the APIs share most modules: a folder for each API would split what one change touches. The
files of one API begin with its name (`messages_`, `responses_`, `ollama_`).
"""
