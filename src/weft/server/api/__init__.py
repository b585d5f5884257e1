"""The API: request schemas, answer formats, errors, the OpenAPI document."""
