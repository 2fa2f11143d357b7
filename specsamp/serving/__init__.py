"""Many texts over few rows: a queue that keeps the rows of a batch busy, and the log that it goes on from."""
