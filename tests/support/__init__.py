"""What the tests share: models small enough to enumerate, mistakes to catch, stand-ins and runners
of scripts.
"""
