"""A fleet in virtual time: scheduler, admission, queue and shedding are the real ones, the device is a formula."""
