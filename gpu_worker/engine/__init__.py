"""The step loop: plans a step, submits it, settles what landed; in a thread of its own."""
