"""Killing training runs at random moments, and looking at what is left: tools/kill_loop.py."""
