"""Images of requests on their way in: fetched where they are elsewhere, checked by their headers, stored by digest."""
