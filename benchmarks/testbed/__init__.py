"""Simulated nodes and links, forked ranks, and properties of this machine."""
