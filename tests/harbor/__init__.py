"""With the true Harbor, in an environment of its own: see docs/harbor-rl.md."""
