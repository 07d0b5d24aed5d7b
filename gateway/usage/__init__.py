"""What a tenant has used: our own form, and that of OpenAI."""
