"""Target families: one file each, the contract in base."""
