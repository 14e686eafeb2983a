"""The parts of the report: generators of checks by what they check."""
