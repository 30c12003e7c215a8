"""Training of drafters: prompts, answers, features, and the drafter that comes of them."""

import os

# MLX walks a graph in breadth only while it is narrower than this, and then in depth, where the
# passes of a step would run one behind the other whatever their streams. It reads the variable at
# its first evaluation, and hangs for ever with one that is no positive number.
_given = os.environ.get("MLX_BFS_MAX_WIDTH", "")
if not (_given.isdecimal() and int(_given)):
    os.environ["MLX_BFS_MAX_WIDTH"] = "1000"
