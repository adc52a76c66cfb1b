"""The node of one machine: life cycle, leases, operations that run once, an exact ledger."""
