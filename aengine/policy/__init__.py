"""Which weights: the policy version, the gate that keeps it stable, and the transaction that changes it."""
