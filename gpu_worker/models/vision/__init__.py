"""Vision towers, and how images become what they read: a family is one file of known parts."""
