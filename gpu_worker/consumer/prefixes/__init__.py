"""Requests wait for the worker that holds their prefix: digests, announcements, offers and claims."""
