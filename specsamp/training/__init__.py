"""Training targets, and distilling drafts from them."""
