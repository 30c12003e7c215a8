"""Training of drafters: prompts, answers, features, and the drafter that comes of them."""
