"""Other implementations' answers: where they lie, and what is in them."""
