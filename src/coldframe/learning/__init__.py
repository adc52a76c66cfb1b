"""What may be learnt from: the contract of a rollout, reward schemas, splits. No torch in here."""
