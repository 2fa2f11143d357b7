"""Logits -> distributions -> tokens. No model, no mesh, no collective."""
