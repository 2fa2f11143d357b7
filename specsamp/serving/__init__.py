"""Decodes many texts over few rows: a list of prompts, or requests as they come."""
