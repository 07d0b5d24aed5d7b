"""Redis, and answers that need no worker: repeated from the cache or shared with an identical request in flight."""
