"""Orchard's own client against a Coldframe service: its routes and fields, not its faults.

Orchard (arXiv 2605.15040) is a sandbox service on Kubernetes. `door` lets its requests in beside
Coldframe's own, `routes`, `files` and `services` answer them, `jobs` keeps commands, `terminal` is
its WebSocket, and `words` has its shapes. What is different on purpose: docs/orchard.md
"""
