"""Many texts over few rows: what keeps the rows of a batch busy, with a closed list of prompts or with requests as they come."""
