"""What is refused when a run is submitted: code that cannot run, packages, storage roots.

Imports no other room. The API asks it; the settings name its rules.
"""
