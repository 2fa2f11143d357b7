"""The transformer and its memory. Arrays carry logical axis names; no mesh is known here."""
