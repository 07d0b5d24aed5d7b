"""Contents of KV blocks below the device's memory: in the host's memory, on disks and in object stores."""
