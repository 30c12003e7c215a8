"""The decode loop: draft, verify, accept, commit. It knows token ids only."""
