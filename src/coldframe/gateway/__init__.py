"""The node as a service: one HTTP application, on a unix socket and on TCP."""
