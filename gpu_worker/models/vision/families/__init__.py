"""The families of vision towers that are served. A file in this folder describes relatives in `FAMILIES`."""
