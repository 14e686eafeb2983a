"""Wrong edits of templates, plan and host code, each a plausible bug, held against ``kdgen verify`` (docs/exactness.md)."""
