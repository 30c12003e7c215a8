"""Drafters: one file each, the contract in base."""
