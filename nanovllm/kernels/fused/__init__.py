"""Short operations in one kernel each."""
