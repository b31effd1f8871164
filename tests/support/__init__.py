"""Helpers that tests share. Nothing in here is a test."""
