"""From a request body to a `Generation`. Pure functions; any may raise an `ApiError` 400 that names the field."""
