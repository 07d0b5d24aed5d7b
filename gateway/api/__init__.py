"""The API: routes, schemas and answers in the formats of OpenAI."""
