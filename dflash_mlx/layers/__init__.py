"""Building blocks that families and drafters share."""
