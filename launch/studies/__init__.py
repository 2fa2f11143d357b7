"""Holds the studies: each measures what one figure or table needs, see launch/README.md."""
