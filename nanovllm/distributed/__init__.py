"""Several processes that compute one model: collectives, the processes themselves, and what the leader tells them."""
