"""From logits to tokens: seeded draws, both log-probabilities, and when a sample ends."""
