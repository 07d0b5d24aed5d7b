"""A smaller model of the same vocabulary as the proposer of drafts."""
