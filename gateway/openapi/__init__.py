"""The description of the public port as OpenAPI 3.1, made from the structs that read bodies and those in here."""
