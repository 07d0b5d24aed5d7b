"""The images of requests: fetched by digest, decoded in limited processes, prepared for the model."""
