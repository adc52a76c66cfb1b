"""Everything needed to explain and replay an attempt: schema, recorder, store."""
