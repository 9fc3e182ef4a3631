"""A short GRPO run that teaches a small model to answer briefly, on rollouts that are verified before they are used."""
