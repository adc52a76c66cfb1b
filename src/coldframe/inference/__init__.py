"""The proxy between a harness and its engine, which keeps the tokens. See docs/inference.md"""
