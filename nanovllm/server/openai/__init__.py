"""OpenAI's protocol: what a request may say, how its answer is made, and the shape of every reply."""
