"""Drafters propose tokens; the target decides. ``base`` says what a proposal is, the other modules hold one drafter each."""
