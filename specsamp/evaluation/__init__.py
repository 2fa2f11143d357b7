"""What a pair's output is worth."""
