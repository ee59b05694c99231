"""What only a Hopper GPU can run; without this folder everything still runs."""
