"""The transformer, its caches and heads. Arrays carry logical axis names; this folder does not
depend on a mesh.
"""
