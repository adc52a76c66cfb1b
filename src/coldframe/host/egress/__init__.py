"""Egress under policy: listeners in a sandbox's network namespace, answered from the host.

`gateway.Gateway` belongs to one sandbox and exists only while its policy is not empty. Why there
is no veth and no NAT: docs/adr/0030-egress-without-veth.md
"""
