"""Drafters propose tokens, and the target model accepts or rejects them. ``base`` defines proposals; each other module holds a drafter."""
