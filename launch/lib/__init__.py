"""Shares what commands and studies need: flags, configurations, cells, and the runner of
studies.
"""
